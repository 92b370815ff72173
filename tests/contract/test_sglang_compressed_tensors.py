"""An SGLang of compressed-tensors with a scale for each row: what is written in place, and what is refused.

SGLang itself is not in it: layers, methods and schemes have its names and form. `test_sglang_layers.py` has
the same with SGLang's own, and `tests/gpu/test_sglang_quantised.py` with all of SGLang.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.quantising_holder import bucket_by_bucket, differing, mapped, read_and_quantised
from tests.contract.sglang_online import IGNORED, OUT, Online, OnlineLinear, doubled, replaced
from tests.contract.sglang_quantised import FP8, Experts, held, host_of, runner, saved, trained
from tests.kernel_doubles import use_doubles
from tests.quantised import by_library, dynamic, same_bits
from weightsync.engines.loading.live_digest import LiveParameters
from weightsync.engines.rank.rank import Rank
from weightsync.errors import ConfigError
from weightsync.plan.layout.formats import Quantization
from weightsync.protocol.messages import HolderDigests

CPU = torch.device("cpu")
EXPERTS = "model.layers.0.mlp.experts"
VALUES = {"float": FP8, "int": torch.int8}


class CompressedTensorsW8A8Fp8(SimpleNamespace):
    """As SGLang's scheme: it gives a layer new parameters, which view what was loaded."""

    values = FP8

    def create_weights(
        self,
        layer: nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., object],
        **_: object,
    ) -> None:
        rows = sum(output_partition_sizes)
        layer.weight = held(rows, input_size_per_partition, dtype=self.values)
        layer.weight_scale = held(rows, 1, dtype=torch.float32)
        for each in (layer.weight, layer.weight_scale):
            vars(each)["weight_loader"] = weight_loader

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(layer.weight_scale.data, requires_grad=False)
        layer.input_scale = None


class CompressedTensorsW8A8Int8(CompressedTensorsW8A8Fp8):
    values = torch.int8


class Asymmetric(CompressedTensorsW8A8Fp8):
    """With zero points of activations, as of int8, for which SGLang adds up each row."""

    def process_weights_after_loading(self, layer: Any) -> None:
        sums = layer.weight.view(torch.int8).sum(1, keepdim=True, dtype=torch.int32).t()
        super().process_weights_after_loading(layer)
        layer.azp_adj = nn.Parameter(sums, requires_grad=False)


class Shuffled(CompressedTensorsW8A8Fp8):
    """As where SGLang puts weights in another order for its kernels."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer.weight = nn.Parameter(layer.weight.data.contiguous(), requires_grad=False)


for each in (Asymmetric, Shuffled):
    each.__name__ = CompressedTensorsW8A8Fp8.__name__


class CompressedTensorsW8A16Fp8(CompressedTensorsW8A8Fp8):
    """For Marlin's kernels, on GPUs that multiply no FP8."""


class CompressedTensorsLinearMethod(SimpleNamespace):
    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        layer.scheme.create_weights(
            layer=layer,
            input_size=input_size,
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            output_size=output_size,
            params_dtype=params_dtype,
            weight_loader=attributes["weight_loader"],
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scheme.process_weights_after_loading(layer)


class CompressedTensorsFusedMoEMethod(SimpleNamespace): ...


class CompressedTensorsW8A8Fp8MoE(SimpleNamespace): ...


class FusedMoE(Experts):
    """All experts, whose rows have a scale each. SGLang leaves them as they were loaded."""

    def __init__(self, of: Experts) -> None:
        nn.Module.__init__(self)
        for name in ("w13_weight", "w2_weight"):
            stack = getattr(of, name)
            self.register_parameter(name, held(*stack.shape, dtype=FP8))
            self.register_parameter(f"{name}_scale", held(*stack.shape[:2], 1, dtype=torch.float32))
        self.quant_method: Any = CompressedTensorsFusedMoEMethod()
        self.scheme = CompressedTensorsW8A8Fp8MoE(runner=runner("triton"))


class Linear(OnlineLinear):
    scheme: Any = CompressedTensorsW8A8Fp8()

    def weight_loader_v2(self, param: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        if self.is_by_columns and tensor.shape[1] == 1:  # a rank with some columns has all scales
            param.data.copy_(tensor)
        else:
            super().weight_loader_v2(param, tensor, part)


class Int8Linear(Linear):
    scheme: Any = CompressedTensorsW8A8Int8()


class Quantised(Online):
    """A rank's model of a checkpoint in FP8, one layer ignored."""

    linear = Linear

    def __init__(self, folder: Path, rank: int = 0, num_ranks: int = 1, padding: int = 3) -> None:
        super().__init__(folder, CompressedTensorsLinearMethod, rank, num_ranks, padding)
        for path, each in list(self.named_modules()):
            if isinstance(each, Experts):
                self.get_submodule(path.rpartition(".")[0]).experts = FusedMoE(each)


class Int8(Quantised):
    linear = Int8Linear


MODELS = {"float": Quantised, "int": Int8}


def config(kind: str = "float") -> dict[str, Any]:
    found = dynamic(kind)
    found["ignore"].append(IGNORED)
    return found


def stored(kind: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What compressed-tensors stores in place of `tensors`."""
    quantization = Quantization.read(config(kind))
    for name, tensor in tensors.items():
        form = quantization.of(name) if name.endswith("_proj.weight") else None
        if form is None:
            yield name, tensor
        else:
            made = by_library(tensor, form, "channel")
            yield from ((name.removesuffix("weight") + last, part) for last, part in made.items())


def started(model: Online, kind: str, tensors: Mapping[str, torch.Tensor]) -> Online:
    """Return a model that has loaded the quantised checkpoint."""
    with torch.no_grad():
        model.load_weights(stored(kind, tensors))
        return model.start()


@pytest.mark.parametrize(
    ("kind", "moe", "rank", "num_ranks", "padding"),
    [
        ("float", False, 0, 1, 3),
        ("float", False, 0, 2, 3),
        ("float", False, 1, 2, 0),
        ("float", True, 0, 1, 3),
        ("int", False, 0, 1, 0),
        ("int", False, 1, 2, 3),
    ],
)
def test_three_versions_are_what_it_makes_of_the_quantised_checkpoint(
    kind: str, moe: bool, rank: int, num_ranks: int, padding: int, tmp_path: Path
) -> None:
    """All are written in place: its loader runs once, for the trace."""
    folder = saved(tmp_path, config(kind), moe)
    model = MODELS[kind](folder, rank, num_ranks, padding).start()
    addresses = {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()}
    before = {name: each.clone() for name, each in model.named_parameters()}
    loads: list[int] = []
    load = model.load_weights
    model.load_weights = lambda weights: loads.append(1) or load(weights)  # type: ignore[method-assign]
    host = host_of(model, folder)
    name = str(VALUES[kind]).removeprefix("torch.")
    assert f"become {name} with a scale for 1 x all" in host.checkpoint().converts
    changed = [name for name, each in model.named_parameters() if not same_bits(each, before[name])]
    assert changed == (["model.embed_tokens.weight"] if padding else []), "a trace wrote"
    for seed in (1, 2, 3):
        tensors = trained(folder, seed)
        tensors["model.layers.0.self_attn.q_proj.weight"][3] = 0
        loader = host.loader(stored=False)
        with torch.no_grad():
            loader.load(iter(tensors.items()))
            loader.finish()
        wanted = started(MODELS[kind](folder, rank, num_ranks, padding), kind, tensors)
        assert differing(model, wanted) == []
        assert LiveParameters(model, CPU).digest() == LiveParameters(wanted, CPU).digest()
        assert padding == int((model.model.embed_tokens.weight == 0).all(1).sum())
    assert loads == [1]
    assert {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()} == addresses


def test_what_its_checkpoint_stores_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = saved(tmp_path, config("int"))
    model = Int8(folder).start()
    host, tensors = host_of(model, folder), trained(folder, 1)
    layout = Rank("sglang", 0, CPU, host).layout().rank_layout()
    assert {meta.name for meta in layout.stored} == {name for name, _ in stored("int", tensors)}
    assert layout.buffers == ()
    loader = host.loader(stored=True)
    with torch.no_grad():
        loader.load(stored("int", tensors))
        loader.finish()
    assert differing(model, started(Int8(folder), "int", tensors)) == []


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("update", "rank", "num_ranks"),
    [(read_and_quantised, 0, 1), (bucket_by_bucket, 0, 1), (bucket_by_bucket, 1, 2)],
)
def test_its_holder_writes_the_same_bytes_where_they_live(
    update: Callable[..., HolderDigests],
    rank: int,
    num_ranks: int,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With doubles of its kernels. A rank with some columns needs whole rows, so that it gets buckets."""
    use_doubles(monkeypatch)
    folder = saved(tmp_path, config(kind))
    model = MODELS[kind](folder, rank, num_ranks).start()
    host, tensors = host_of(model, folder), trained(folder, 1)
    metas, places = host.checkpoint().tensors, host.places()
    assert places
    made = update(metas, places.export(places.formats), mapped(model), tensors)
    assert differing(model, started(MODELS[kind](folder, rank, num_ranks), kind, tensors)) == []
    places.require(made.stored)


def test_what_is_not_quantised_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, dynamic("float"))
    with pytest.raises(ConfigError, match=r"SGLang's layer has weight \(bfloat16\)") as raised:
        host_of(Quantised(folder).start(), folder).checkpoint()
    assert raised.value.field == f"quantization_config of {IGNORED}.weight"


Change = Callable[[Any], object]


def scheme(path: str, held: Any) -> Change:
    return lambda model: setattr(model.get_submodule(path), "scheme", held)


def processed_by(other: CompressedTensorsW8A8Fp8) -> Change:
    """Have a layer be as another scheme makes it."""

    def change(model: Any) -> None:
        layer = model.get_submodule(OUT)
        layer.scheme = other
        columns, rows = layer.weight.shape
        load = layer.weight_loader_v2
        layer.quant_method.create_weights(
            layer, columns, [rows], columns, rows, torch.bfloat16, weight_loader=load
        )
        layer.quant_method.process_weights_after_loading(layer)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "marlin": (scheme(OUT, CompressedTensorsW8A16Fp8()), r"o_proj: .*W8A16Fp8 may repack.*8\.9"),
    "experts": (scheme(EXPERTS, SimpleNamespace()), r"experts: SimpleNamespace may repack"),
    "runner": (
        scheme(EXPERTS, CompressedTensorsW8A8Fp8MoE(runner=runner("flashinfer_trtllm"))),
        r"flashinfer_trtllm may rearrange.*moe_runner_backend",
    ),
    "no runner": (scheme(EXPERTS, CompressedTensorsW8A8Fp8MoE()), r"None may rearrange experts"),
    "AMX": (
        lambda model: vars(model.get_submodule(OUT)).update(use_intel_amx_backend=True),
        r"packed for AMX",
    ),
    "other values": (processed_by(CompressedTensorsW8A8Int8()), r"float8_e4m3fn, as int8"),
    "sums": (processed_by(Asymmetric()), r"o_proj\.azp_adj"),
    "order": (processed_by(Shuffled()), r"SGLang puts .*o_proj\.weight in another order"),
    "order of its own": (
        replaced("weight", lambda weight: weight.contiguous()),
        r"SGLang puts .*o_proj\.weight in another order",
    ),
    "beside": (
        lambda model: vars(model.get_submodule(OUT)).update(packed=torch.zeros(8)),
        r"o_proj\.packed is no parameter",
    ),
    "computes": (doubled, r"its loader runs aten\.mul\.Tensor on .*, in ignore,"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_in_place_is_refused_when_connecting(case: str, tmp_path: Path) -> None:
    change, reason = REFUSED[case]
    folder = saved(tmp_path, config(), moe=True)
    model = Quantised(folder).start()
    host_of(model, folder).checkpoint()
    change(model)
    held = {name: id(each) for name, each in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"(?s){reason}.*vLLM") as raised:
        host_of(model, folder).checkpoint()
    assert (raised.value.field, raised.value.value) == ("quantization_config", "compressed-tensors")
    assert {name: id(each) for name, each in model.named_parameters()} == held, "a trace left its own"


@pytest.mark.parametrize(
    "weights", [{"strategy": "tensor"}, {"strategy": "block", "block_structure": [128, 128]}]
)
def test_other_scales_are_refused_before_anything_is_loaded(
    weights: Mapping[str, Any], tmp_path: Path
) -> None:
    other = copy.deepcopy(config())
    other["config_groups"]["group_0"]["weights"] |= weights
    folder = saved(tmp_path, other)
    with pytest.raises(ConfigError, match=r"with vLLM, or give SGLang .*strategy: channel") as raised:
        host_of(nn.Module(), folder).checkpoint()
    assert raised.value.field.startswith("quantization_config of model.layers.0.")
