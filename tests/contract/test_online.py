"""An engine quantises to FP8 when it starts: updates write the bytes that the engine makes when it starts.

Layers have the engines' names and form, and quantisers are stated in plain torch. vLLM's own layerwise
loading and reload run here, SGLang itself does not. `tests/gpu/test_vllm_quantised.py` and
`tests/gpu/test_sglang_quantised.py` have the same with the engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.online import ENGINES, MARKS, OnlineEngine, Tensors, weights_of
from tests.contract.quantising_holder import bucket_by_bucket, differing, load, mapped, read_and_quantised
from tests.contract.sglang_online import W8A8Fp8LinearMethod
from tests.contract.sglang_quantised import CPU, EXPERTS, OUT, saved
from tests.kernel_doubles import use_doubles
from tests.quantised import same_bits
from weightsync.engines.loading.live_digest import LiveParameters, parameters_of
from weightsync.protocol.device_memory import StoredTable
from weightsync.quantising.quantizing_tables import NoKernelError


@dataclass(frozen=True)
class Case:
    """An engine, and what a rank has of a model, which has experts or none."""

    of: str
    moe: bool
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> OnlineEngine:
        return ENGINES[self.of]

    def saved(self, folder: Path) -> Path:
        return saved(folder, {}, moe=self.moe)

    def weights(self, folder: Path, seed: int) -> Tensors:
        return weights_of(folder, self.moe, seed)

    def started(self, folder: Path, seed: int) -> Any:
        """Return a model that the engine has started with a version."""
        return self.start(folder, self.weights(folder, seed))

    def start(self, folder: Path, tensors: Tensors) -> Any:
        return self.engine.started(folder, self.moe, tensors, **self.parts)


FIRST, SECOND = {"rank": 0, "num_ranks": 2}, {"rank": 1, "num_ranks": 2}
OTHER: dict[str, Any] = {"method": W8A8Fp8LinearMethod}
CASES = {
    "sglang": Case("sglang", False),
    "sglang_first_of_two": Case("sglang", False, FIRST),
    "sglang_second_of_two": Case("sglang", False, SECOND),
    "sglang_unpadded": Case("sglang", False, {"padding": 0}),
    "sglang_w8a8": Case("sglang", False, OTHER),
    "sglang_w8a8_first_of_two": Case("sglang", False, OTHER | FIRST),
    "sglang_w8a8_second_of_two": Case("sglang", False, OTHER | SECOND),
    "sglang_w8a8_unpadded": Case("sglang", False, OTHER | {"padding": 0}),
    "sglang_experts": Case("sglang", True),
    "sglang_experts_first_of_two": Case("sglang", True, {"part": (0, 2)}),
    "sglang_experts_second_of_two": Case("sglang", True, {"part": (1, 2)}),
    "sglang_second_half_of_experts": Case("sglang", True, {"share": (1, 2)}),
    "vllm": Case("vllm", False),
    "vllm_first_of_two": Case("vllm", False, FIRST),
    "vllm_second_of_two": Case("vllm", False, SECOND),
    "vllm_experts": Case("vllm", True),
    "vllm_experts_first_of_two": Case("vllm", True, FIRST),
    "vllm_experts_second_of_two": Case("vllm", True, SECOND),
    "vllm_first_half_of_experts": Case("vllm", True, FIRST | {"whole_experts": True}),
    "vllm_second_half_of_experts": Case("vllm", True, SECOND | {"whole_experts": True}),
}


def cases(*names: str) -> pytest.MarkDecorator:
    chosen = [pytest.param(CASES[each], id=each, marks=MARKS[CASES[each].of]) for each in names or CASES]
    return pytest.mark.parametrize("case", chosen)


NO_KERNEL = r"(_proj|experts).*: no kernel quantises it to float8|stored in different formats"
WHOLE = ("sglang", "sglang_experts", "vllm", "vllm_experts")


def says(case: Case) -> set[str]:
    """Return what an engine's checkpoint says of conversions."""
    found = {"become float8_e4m3fn with a scale for"}
    if case.moe:
        found.add("of gate_proj and up_proj together")
    if case.engine.one_scale:
        found.add("of q_proj and k_proj and v_proj together")
    else:
        found.add("become float8_e4m3fn with a scale for 1 x all")
    return found


@cases()
def test_three_versions_are_what_it_makes_of_them_when_it_starts(case: Case, tmp_path: Path) -> None:
    """SGLang's loader only runs for the trace. vLLM's loads the first version, and so proves the places."""
    folder, engine = case.saved(tmp_path), case.engine
    model = case.started(folder, 0)
    with torch.no_grad():  # a version never leaves this there
        for each in model.parameters():
            if each.dim():
                each.view(torch.uint8).fill_(1)
    held = {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()}
    before = {name: each.clone() for name, each in model.named_parameters()}
    state, host = engine.state(model), engine.host(model, folder)
    checkpoint = host.checkpoint()
    assert {each for each in says(case) if each not in checkpoint.converts} == set()
    assert (checkpoint.stored == ()) == engine.one_scale
    changed = [name for name, each in model.named_parameters() if not same_bits(each, before[name])]
    pads = case.of == "sglang" and case.parts.get("padding") != 0
    assert changed == (["model.embed_tokens.weight"] if pads else []), "a trace wrote"
    assert engine.state(model) == state, "a trace left something"
    places = host.places()
    assert places
    assert places.are_right is engine.is_right
    loads = [engine.num_loads(model)]
    for version in (1, 2, 3):
        tensors = case.weights(folder, version)
        load(host.loader(stored=False), tensors)
        loads.append(engine.num_loads(model))
        assert host.places() is places
        assert places.are_right
        wanted = case.start(folder, tensors)
        assert differing(model, wanted) == []
        assert LiveParameters(model, CPU).digest() == LiveParameters(wanted, CPU).digest()
    first = engine.loads_of_first(model)
    assert [each - loads[0] for each in loads[1:]] == [first] * 3
    assert {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()} == held


@cases()
def test_an_update_may_come_tensor_by_tensor_in_any_order(case: Case, tmp_path: Path) -> None:
    """A gate waits for its up projection, and queries for keys and values, where these have one scale."""
    folder = case.saved(tmp_path)
    model = case.started(folder, 0)
    host = case.engine.host(model, folder)
    host.checkpoint()
    for seed in (1, 2):
        tensors, loader = case.weights(folder, seed), host.loader(stored=False)
        with torch.no_grad():
            for name, tensor in reversed(tensors.items()):
                loader.load([(name, tensor)])
            loader.finish()
        assert differing(model, case.start(folder, tensors)) == []
    assert host.places().are_right


@cases()
def test_its_holder_writes_the_same_bytes_where_they_live(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it reads, with doubles of its kernels. It maps parameters as bytes.

    No kernel takes the maxima of several matrices of buckets first, which it says.
    """
    use_doubles(monkeypatch)
    folder = case.saved(tmp_path)
    model = case.started(folder, 0)
    host = case.engine.host(model, folder)
    metas, places = host.checkpoint().tensors, host.places()
    assert places
    export = places.export(places.formats)
    assert StoredTable.of(export).export() == export
    tensors = case.weights(folder, 1)
    made = read_and_quantised(metas, export, mapped(model), tensors)
    assert differing(model, case.start(folder, tensors)) == []
    places.require(made.stored)
    tensors = case.weights(folder, 2)
    if case.moe or case.engine.one_scale:
        with pytest.raises(NoKernelError, match=NO_KERNEL):
            bucket_by_bucket(metas, export, mapped(model), tensors)
    else:
        made = bucket_by_bucket(metas, export, mapped(model), tensors)
        assert differing(model, case.start(folder, tensors)) == []
        places.require(made.stored)


@cases(*WHOLE)
def test_a_tensor_that_does_not_come_fails_the_update_by_name_and_the_next_heals(
    case: Case, tmp_path: Path
) -> None:
    folder = case.saved(tmp_path)
    model = case.started(folder, 0)
    host = case.engine.host(model, folder)
    host.checkpoint()
    name = f"{EXPERTS}.2.gate_proj.weight" if case.moe else "model.layers.0.self_attn.v_proj.weight"
    told = (
        r"2\.gate_proj\.weight did not come, .* with .*2\.up_proj"
        if case.moe
        else r"v_proj\.weight did not come"
    )
    for seed in (1, 2):
        tensors = case.weights(folder, seed)
        last, loader = tensors.pop(name), host.loader(stored=False)
        with pytest.raises(RuntimeError, match=told):
            load(loader, tensors)
        loader.abandon()
        tensors[name] = last
        load(host.loader(stored=False), tensors)
        assert differing(model, case.start(folder, tensors)) == []


@cases("sglang", "vllm")
def test_parameters_that_moved_are_found_again(case: Case, tmp_path: Path) -> None:
    folder = case.saved(tmp_path)
    model = case.started(folder, 0)
    host = case.engine.host(model, folder)
    host.checkpoint()
    load(host.loader(stored=False), case.weights(folder, 1))
    before = host.places()
    assert host.places() is before
    layer = model.get_submodule(OUT)
    layer.weight.data = layer.weight.data.t().clone().t()
    after = host.places()
    assert after
    assert after is not before
    assert after.are_right is case.engine.is_right
    assert after.addresses()[f"{OUT}.weight"] == layer.weight.data_ptr()
    load(host.loader(stored=False), case.weights(folder, 2))
    assert after.are_right
    assert differing(model, case.started(folder, 2)) == []


@cases("sglang_experts_second_of_two", "vllm_experts_second_of_two")
def test_both_projections_of_an_expert_have_their_scale_in_one_place(case: Case, tmp_path: Path) -> None:
    folder = case.saved(tmp_path)
    host = case.engine.host(case.started(folder, 0), folder)
    shapes = {meta.name: meta.shape for meta in host.checkpoint().tensors}
    half = shapes[f"{EXPERTS}.gate_up_proj"][1] // 4
    places = host.places()
    assert places
    form = places.formats[f"{EXPERTS}.0.gate_proj.weight"]
    assert (form.block, form.together) == ((half, 0), ("gate_proj", "up_proj"))
    (gate,), (up,) = (places.held(f"{EXPERTS}.3.{part}_proj.weight_scale") for part in ("gate", "up"))
    assert gate[0].box == up[0].box
    assert gate[0].box.offset == (1, 0)
    assert gate[1].data_ptr() == up[1].data_ptr()
    down = places.formats[f"{EXPERTS}.0.down_proj.weight"]
    assert (down.block, down.together) == ((0, half), ())
    live = dict(parameters_of(host.model()))
    stacks = [name for name in live if EXPERTS in name]
    assert len(stacks) == 4
    for name in stacks:
        assert places.num_elements[name] == live[name].numel()
