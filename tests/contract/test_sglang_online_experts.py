"""An SGLang that quantised experts to FP8 when it started: what is written in place, and what is refused.

SGLang itself is not in it: layers and methods have its names and form, and its quantiser is stated in plain
torch, as its kernel's source has it. `tests/gpu/test_sglang_quantised.py` has the same with SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.quantising_holder import bucket_by_bucket, mapped, read_and_quantised
from tests.contract.test_sglang_online import Fp8LinearMethod, Online
from tests.contract.test_sglang_quantized import (
    CPU,
    EXPERTS,
    FP8,
    Experts,
    host_of,
    runner,
    saved,
    trained,
)
from tests.kernel_doubles import use_doubles
from tests.quantised import same_bits
from weightsync.engines.loading.live_digest import LiveParameters, parameters_of
from weightsync.errors import ConfigError
from weightsync.protocol.device_memory import StoredTable
from weightsync.quantising.quantizing_tables import NoKernelError

GATE = f"{EXPERTS}.0.gate_proj.weight"
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's values, and one float32 scale, of finite weights. Zeros times infinity are 448."""
    scale = weight.float().abs().max() / torch.tensor(448.0)
    return (weight.float() * (1 / scale)).nan_to_num(448).clamp(-448, 448).to(FP8), scale.reshape(1)


class Fp8MoEMethod(SimpleNamespace):
    """As SGLang's for ``quantization="fp8"``, without a ``quantization_config``."""

    def __init__(self, quantise: Quantise = whole) -> None:
        config = SimpleNamespace(is_checkpoint_fp8_serialized=False)
        held = {"block_quant": False, "use_mxfp8": False, "quantise": quantise, "runner": runner("triton")}
        super().__init__(quant_config=config, **held)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **attributes: Any,
    ) -> None:
        assert not with_bias
        assert layer.num_local_experts  # SGLang's methods read attributes of the layer itself
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            vars(weight).update(attributes)
            layer.register_parameter(name, weight)
        layer.w13_weight_scale = nn.Parameter(torch.ones(num_experts, 2), requires_grad=False)
        layer.w2_weight_scale = nn.Parameter(torch.ones(num_experts), requires_grad=False)
        layer.w13_input_scale = layer.w2_input_scale = None

    def process_weights_after_loading(self, layer: Any) -> None:
        made = {
            name: torch.empty_like(getattr(layer, name), dtype=FP8) for name in ("w13_weight", "w2_weight")
        }
        layer.w13_weight_scale = nn.Parameter(torch.ones(layer.num_local_experts), requires_grad=False)
        for number in range(layer.num_local_experts):
            for name, values in made.items():
                scales = getattr(layer, f"{name}_scale")
                values[number], scales[number] = self.quantise(getattr(layer, name).data[number])
        for name, values in made.items():
            setattr(layer, name, nn.Parameter(values, requires_grad=False))


class FusedMoE(Experts):
    """A rank's part of all experts, or all of some experts."""

    def __init__(self, of: Experts, method: Any, part: tuple[int, int], share: tuple[int, int]) -> None:
        nn.Module.__init__(self)
        number, columns, width = of.w2_weight.shape
        (self.part, num_parts), (first, num_shares) = part, share
        self.num_local_experts = number // num_shares
        self.first, self.quant_method = first * self.num_local_experts, method
        method.create_weights(
            layer=self,
            num_experts=self.num_local_experts,
            hidden_size=columns,
            intermediate_size_per_partition=width // num_parts,
            params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader,
        )

    def load(self, number: int, part: str, leaf: str, tensor: torch.Tensor) -> None:
        shard = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part]
        param: Any = self.w2_weight if shard == "w2" else self.w13_weight
        param.weight_loader(param, tensor, f"{leaf} of {part}", shard_id=shard, expert_id=number)

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        if not 0 <= expert_id - self.first < self.num_local_experts:
            return  # another rank's
        target = param.data[expert_id - self.first]
        if shard_id == "w2":
            size = target.shape[1]
            target.copy_(loaded_weight.narrow(1, self.part * size, size))
        else:
            size = target.shape[0] // 2
            part = loaded_weight.narrow(0, self.part * size, size)
            target.narrow(0, size if shard_id == "w3" else 0, size).copy_(part)


class OnlineMoe(Online):
    """Has the layers of a mixture of experts, of which SGLang quantises the linear ones, too."""

    def __init__(
        self,
        folder: Path,
        method: Callable[[], Any] = Fp8MoEMethod,
        part: tuple[int, int] = (0, 1),
        share: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__(folder, Fp8LinearMethod, *part)
        for path, each in list(self.named_modules()):
            if isinstance(each, Experts):
                parent, _, last = path.rpartition(".")
                setattr(self.get_submodule(parent), last, FusedMoE(each, method(), part, share))
        draw = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw).to(parameter.dtype))

    def start(self) -> OnlineMoe:
        super().start()
        for each in self.modules():
            if isinstance(each, FusedMoE):
                each.quant_method.process_weights_after_loading(each)
        return self


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {}, moe=True)


def weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Of a trainer. Up projections are greater than gates, one expert is zero, and one has other sizes."""
    tensors = trained(folder, seed)
    for name, each in tensors.items():
        if ".experts." in name:
            each *= 5 if ".up_proj" in name else 1
            each *= {0: 0.0, 1: 1e-4}.get(int(name.split(".experts.")[1].split(".")[0]), 1.0)
    return tensors


def differing(model: nn.Module, wanted: nn.Module) -> list[str]:
    live = dict(parameters_of(wanted))
    found = dict(parameters_of(model))
    assert found.keys() == live.keys()
    return [name for name, each in found.items() if not same_bits(each, live[name])]


RANKS = {
    "alone": {},
    "first of two": {"part": (0, 2)},
    "second of two": {"part": (1, 2)},
    "second half of the experts": {"share": (1, 2)},
}


@pytest.mark.parametrize("rank", RANKS)
def test_three_versions_are_what_it_makes_of_them_when_it_starts(rank: str, folder: Path) -> None:
    """All are written in place: its loader runs once, for the trace."""
    model = OnlineMoe(folder, **RANKS[rank]).start()
    held = {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()}
    before = {name: each.clone() for name, each in model.named_parameters()}
    loads: list[int] = []
    load = model.load_weights
    model.load_weights = lambda weights: loads.append(1) or load(weights)  # type: ignore[method-assign]
    host = host_of(model, folder)
    converts = host.checkpoint().converts
    assert "become float8_e4m3fn with a scale for 1 x all" in converts
    assert "of gate_proj and up_proj together" in converts
    changed = [name for name, each in model.named_parameters() if not same_bits(each, before[name])]
    assert changed == ["model.embed_tokens.weight"], "a trace wrote"
    for seed in (1, 2, 3):
        tensors = weights(folder, seed)
        loader = host.loader(stored=False)
        wanted = OnlineMoe(folder, **RANKS[rank])
        with torch.no_grad():
            for name, tensor in reversed(tensors.items()):
                loader.load([(name, tensor)])
            loader.finish()
            wanted.load_weights(tensors.items())
            wanted.start()
        assert differing(model, wanted) == []
        assert LiveParameters(model, CPU).digest() == LiveParameters(wanted, CPU).digest()
    assert loads == [1]
    assert {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()} == held


def test_both_projections_of_an_expert_have_their_scale_in_one_place(folder: Path) -> None:
    host = host_of(OnlineMoe(folder, part=(1, 2)).start(), folder)
    stored = {meta.name: meta for meta in host.checkpoint().stored}
    places = host.places()
    assert places
    form, whole_gate = places.formats[GATE], stored[GATE]
    assert (form.block, form.together) == ((whole_gate.shape[0] // 2, 0), ("gate_proj", "up_proj"))
    (gate,), (up,) = (places.held(f"{EXPERTS}.3.{part}_proj.weight_scale") for part in ("gate", "up"))
    assert gate[0].box == up[0].box
    assert gate[0].box.offset == (1, 0)
    assert gate[1].data_ptr() == up[1].data_ptr()
    down = places.formats[f"{EXPERTS}.0.down_proj.weight"]
    assert (down.block, down.together) == ((0, whole_gate.shape[0] // 2), ())
    names = dict(parameters_of(host.model()))
    for name in (f"{EXPERTS}.w13_weight", f"{EXPERTS}.w13_weight_scale", f"{EXPERTS}.w2_weight_scale"):
        assert places.num_elements[name] == names[name].numel()


def test_a_projection_that_does_not_come_fails_the_update_by_name(folder: Path) -> None:
    host = host_of(OnlineMoe(folder).start(), folder)
    host.checkpoint()
    tensors = weights(folder, 1)
    del tensors[GATE]
    loader = host.loader(stored=False)
    with torch.no_grad():
        loader.load(iter(tensors.items()))
    with pytest.raises(RuntimeError, match=r"0\.gate_proj\.weight did not come, .* with .*0\.up_proj"):
        loader.finish()


@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
def test_its_holder_writes_the_same_bytes_where_they_live(
    part: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it reads. No kernel takes the maxima of two matrices of buckets first, which it says."""
    use_doubles(monkeypatch)
    model = OnlineMoe(folder, part=part).start()
    host = host_of(model, folder)
    metas, places, tensors = host.checkpoint().tensors, host.places(), weights(folder, 1)
    assert places
    export = places.export(places.formats)
    assert StoredTable.of(export).export() == export
    made = read_and_quantised(metas, export, mapped(model), tensors)
    wanted = OnlineMoe(folder, part=part)
    with torch.no_grad():
        wanted.load_weights(tensors.items())
    parameters = dict(parameters_of(wanted.start()))
    assert [name for name, each in parameters_of(model) if not same_bits(each, parameters[name])] == []
    places.require(made.stored)
    with pytest.raises(NoKernelError, match=r"experts.*: no kernel quantises it to float8"):
        bucket_by_bucket(metas, export, mapped(model), tensors)


Change = Callable[[Any], object]


def method(**attributes: object) -> Change:
    return lambda experts: vars(experts.quant_method).update(attributes)


def replaced(name: str, data: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Have a parameter be otherwise."""
    return lambda experts: setattr(
        experts, name, nn.Parameter(data(getattr(experts, name).data), requires_grad=False)
    )


def loads(load: Callable[[torch.Tensor, torch.Tensor, str], object]) -> Change:
    """Have a loader put the first expert elsewhere."""

    def change(experts: Any) -> None:
        loader = experts.weight_loader

        def other(param: Any, tensor: torch.Tensor, name: str, shard_id: str, expert_id: int) -> None:
            if expert_id:
                loader(param, tensor, name, shard_id=shard_id, expert_id=expert_id)
            else:
                load(param.data[0], tensor, shard_id)

        experts.weight_loader = other

    return change


def by_turns(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
    """Put rows of the gate between those of the up projection."""
    (target if shard == "w2" else target[0 if shard == "w1" else 1 :: 2]).copy_(tensor)


def in_halves(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
    """Put half of the up projection before the gate, and half behind it."""
    quarter = len(tensor) // 2
    if shard == "w1":
        target[quarter : 3 * quarter].copy_(tensor)
    elif shard == "w3":
        target[:quarter].copy_(tensor[:quarter])
        target[3 * quarter :].copy_(tensor[quarter:])
    else:
        target.copy_(tensor)


def doubled(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
    target[len(tensor) * (shard == "w3") :][: len(tensor)].copy_(tensor * 2)


REFUSED: dict[str, tuple[Change, str]] = {
    "TRT-LLM": (method(runner=runner("flashinfer_trtllm")), r"flashinfer_trtllm may rearrange experts"),
    "HPC": (method(runner=runner("hpc_ops")), r"hpc_ops may rearrange experts: moe_runner_backend='triton'"),
    "no runner": (method(runner=None), r"backend None may rearrange experts"),
    "marlin": (method(use_marlin=True), r"SGLANG_FORCE_FP8_MARLIN"),
    "groups": (method(block_quant=True), r"quantised in groups \(MXFP8\)"),
    "two scales": (
        replaced("w13_weight_scale", lambda scales: torch.stack([scales, scales], 1)),
        r"its w13_weight holds torch\.float8_e4m3fn .*, and scales torch\.float32 \(8, 2\)",
    ),
    "no scale": (
        lambda experts: delattr(experts, "w2_weight_scale"),
        r"its w2_weight has no w2_weight_scale",
    ),
    "whole": (
        replaced("w2_weight", lambda stack: stack.to(torch.bfloat16)),
        r"its w2_weight holds .*bfloat16",
    ),
    "order": (
        replaced("w13_weight", lambda stack: stack.transpose(1, 2).contiguous().transpose(1, 2)),
        r"experts of its w13_weight lie between others",
    ),
    "AMX": (lambda experts: vars(experts).update(use_intel_amx_backend=True), r"packed for AMX"),
    "by turns": (loads(by_turns), r"w13_weight has rows that are not those of .*\.0\.(gate|up)_proj"),
    "in halves": (loads(in_halves), r"w13_weight has one scale for parts of .*up_proj.* and .*gate_proj"),
    "computes": (loads(doubled), r"its loader runs aten\.mul\.Tensor on .*experts\.0\."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_in_place_is_refused_when_connecting(case: str, folder: Path) -> None:
    change, reason = REFUSED[case]
    model = OnlineMoe(folder).start()
    host_of(model, folder).checkpoint()
    change(model.get_submodule(EXPERTS))
    held = {name: id(each) for name, each in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"(?s){reason}.*vLLM") as raised:
        host_of(model, folder).checkpoint()
    assert (raised.value.field, raised.value.value) == ("options.quantization", "fp8")
    assert {name: id(each) for name, each in model.named_parameters()} == held, "a trace left its own"


def parts(first: int, second: int) -> Callable[[torch.Tensor, torch.Tensor, str], object]:
    """Have a rank keep parts of a gate, and of other projections, that start at quarters of them."""

    def load(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
        axis, size = (1, target.shape[1]) if shard == "w2" else (0, len(target) // 2)
        start = (first if shard == "w1" else second) * size // 2
        part = tensor.narrow(axis, start, size)
        target[size * (shard == "w3") :][: len(part)].copy_(part)

    return load


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (parts(1, 1), r"w13_weight: ranks keep unequal parts of .*experts\.0\.gate_proj"),
        (
            parts(0, 2),
            r"w13_weight has one scale for parts of .*0\.gate_proj\.weight and .*0\.up_proj\.weight",
        ),
    ],
)
def test_parts_that_ranks_do_not_keep_alike_are_refused(load: Any, reason: str, folder: Path) -> None:
    model = OnlineMoe(folder, part=(0, 2)).start()
    loads(load)(model.get_submodule(EXPERTS))
    with pytest.raises(ConfigError, match=reason):
        host_of(model, folder).checkpoint()


def a_scale_each(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise halves of an expert by themselves."""
    halves = [whole(each) for each in weight.chunk(2)]
    return torch.cat([values for values, _ in halves]), torch.maximum(*(scale for _, scale in halves))


def by_product(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With a product in place of the division, as fast math has it."""
    scale = weight.float().abs().max() * torch.tensor(1 / 448)
    return (weight.float() / scale).to(FP8), scale.reshape(1)


@pytest.mark.parametrize("quantise", [a_scale_each, by_product])
def test_a_quantiser_with_other_bytes_is_refused(quantise: Quantise, folder: Path) -> None:
    model = OnlineMoe(folder, lambda: Fp8MoEMethod(quantise)).start()
    with pytest.raises(ConfigError, match=r"mlp\.experts: .*other bytes than are known, on a CPU.*vLLM"):
        host_of(model, folder).checkpoint()


def test_each_size_of_expert_is_compared_once(folder: Path) -> None:
    counts: list[Mapping[str, int]] = []

    def counted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append({"rows": len(weight)})
        return whole(weight)

    model = OnlineMoe(folder).start()
    for each in model.modules():
        if isinstance(each, FusedMoE):
            each.quant_method.quantise = counted
    host_of(model, folder).checkpoint()
    assert len(counts) == 2
