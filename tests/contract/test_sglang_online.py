"""An SGLang that quantised its weights to FP8 when it started: what is written in place, and what is refused.

SGLang itself is not in it: layers and methods have its names and form, and its quantiser is stated in plain
torch, as its machine code for Hopper GPUs has it. Only the reciprocal differs, which is approximate there.
`tests/gpu/test_sglang_quantised.py` has the same with SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.quantising_holder import bucket_by_bucket, mapped, read_and_quantised
from tests.contract.test_sglang_quantized import (
    CPU,
    FP8,
    PACKED,
    Linear,
    Model,
    host_of,
    saved,
    trained,
)
from tests.kernel_doubles import use_doubles
from tests.quantised import same_bits
from weightsync.engines.loading.live_digest import LiveParameters, parameters_of
from weightsync.engines.rank.rank import Rank
from weightsync.errors import ConfigError
from weightsync.plan import Layout
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.plan.layout.coverage import covers_all
from weightsync.protocol.messages import HolderDigests

OUT = "model.layers.0.self_attn.o_proj"
IGNORED = "model.layers.1.self_attn.o_proj"
BY_COLUMNS = ("o_proj", "down_proj")


def by_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's values, and a float32 scale for each row, of finite weights."""
    scales = weight.float().abs().amax(1, keepdim=True) * torch.tensor(1 / 448, dtype=torch.float32)
    inverses = torch.where(scales == 0, torch.zeros(1), scales.reciprocal())
    return (weight.float() * inverses).clamp(-448, 448).to(FP8), scales


class Fp8LinearMethod(SimpleNamespace):
    """As SGLang's for ``quantization="fp8"``, without a ``quantization_config``."""

    def __init__(self, **attributes: object) -> None:
        config = SimpleNamespace(is_checkpoint_fp8_serialized=False)
        held = {"block_quant": False, "use_mxfp8": False, "use_marlin": False, "quantize": by_row}
        super().__init__(quant_config=config, **held | attributes)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., object],
    ) -> None:
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.weight = nn.Parameter(data, requires_grad=False)
        layer.weight.weight_loader = weight_loader  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: Any) -> None:
        values, scales = self.quantize(layer.weight)
        layer.weight = nn.Parameter(values.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scales.t().contiguous(), requires_grad=False)
        layer.input_scale = None


class W8A8Fp8LinearMethod(Fp8LinearMethod):
    """As SGLang's for ``quantization="w8a8_fp8"``: it names its config otherwise, and has an older loader."""

    def __init__(self) -> None:
        super().__init__()
        self.quantization_config = vars(self).pop("quant_config")


class OnlineLinear(Linear):
    """A rank's part of a matrix: of its rows, or for the last layers of a block of its columns."""

    def __init__(self, parts: Mapping[str, tuple[int, int]], method: Any, rank: int, num_ranks: int) -> None:
        self.rank, self.is_by_columns = rank, next(iter(parts)) in BY_COLUMNS
        cut = (1, num_ranks) if self.is_by_columns else (num_ranks, 1)
        super().__init__({name: (n // cut[0], m // cut[1]) for name, (n, m) in parts.items()}, False)
        rows, columns = self.weight.shape
        self.quant_method = method
        load = self.weight_loader if isinstance(method, W8A8Fp8LinearMethod) else self.weight_loader_v2
        method.create_weights(self, columns, [rows], columns, rows, torch.bfloat16, weight_loader=load)

    def load(self, part: str, leaf: str, tensor: torch.Tensor) -> None:
        param: Any = getattr(self, leaf)
        param.weight_loader(param, tensor, part)

    def weight_loader_v2(self, param: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        rows, columns = self.parts[part]
        axis, size = (1, columns) if self.is_by_columns else (0, rows)
        before = list(self.parts)[: list(self.parts).index(part)]
        target = param.data.narrow(0, sum(self.parts[each][0] for each in before), rows)
        target.copy_(tensor.narrow(axis, self.rank * size, size))

    def weight_loader(self, param: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        assert isinstance(self.quant_method, W8A8Fp8LinearMethod), "the other loader is the layer's"
        self.weight_loader_v2(param, tensor, part)


class Online(Model):
    """Has the layers of a Qwen3 that SGLang quantises, one of them ignored. `start` quantises."""

    linear = OnlineLinear

    def __init__(
        self,
        folder: Path,
        method: Callable[[], Any] = Fp8LinearMethod,
        rank: int = 0,
        num_ranks: int = 1,
        padding: int = 3,
    ) -> None:
        fused = {f"{of}.{PACKED.get(last, last)}" for of, _, last in map(split, paths(folder))}
        super().__init__(folder, ignored=fused, padding=padding)
        for path, each in list(self.named_modules()):
            if isinstance(each, Linear) and path != IGNORED:
                parent, _, last = split(path)
                setattr(self.get_submodule(parent), last, self.linear(each.parts, method(), rank, num_ranks))
        draw = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=draw).to(each.dtype))

    def start(self) -> Online:
        for module in self.modules():
            if isinstance(module, OnlineLinear):
                module.quant_method.process_weights_after_loading(module)
        return self


def split(path: str) -> tuple[str, str, str]:
    return path.rpartition(".")


def paths(folder: Path) -> Iterable[str]:
    return [name.removesuffix(".weight") for name in trained(folder, 0) if name.endswith("_proj.weight")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {})


@pytest.mark.parametrize("method", [Fp8LinearMethod, W8A8Fp8LinearMethod])
@pytest.mark.parametrize(("rank", "num_ranks", "padding"), [(0, 1, 3), (0, 1, 0), (0, 2, 3), (1, 2, 3)])
def test_three_versions_are_what_it_makes_of_them_when_it_starts(
    method: Callable[[], Any], rank: int, num_ranks: int, padding: int, folder: Path
) -> None:
    """All are written in place: its loader runs once, for the trace."""
    model = Online(folder, method, rank, num_ranks, padding).start()
    held = {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()}
    before = {name: each.clone() for name, each in model.named_parameters()}
    loads: list[int] = []
    load = model.load_weights
    model.load_weights = lambda weights: loads.append(1) or load(weights)  # type: ignore[method-assign]
    host = host_of(model, folder)
    checkpoint = host.checkpoint()
    assert "become float8_e4m3fn with a scale for 1 x all" in checkpoint.converts
    changed = [name for name, each in model.named_parameters() if not same_bits(each, before[name])]
    assert changed == (["model.embed_tokens.weight"] if padding else []), "a trace wrote"
    for seed in (1, 2, 3):
        tensors = trained(folder, seed)
        tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
        loader = host.loader(stored=False)
        wanted = Online(folder, method, rank, num_ranks, padding)
        with torch.no_grad():
            loader.load(iter(tensors.items()))
            loader.finish()
            wanted.load_weights(tensors.items())
            wanted.start()
        live = dict(parameters_of(wanted))
        assert [name for name, each in parameters_of(model) if not same_bits(each, live[name])] == []
        assert LiveParameters(model, CPU).digest() == LiveParameters(wanted, CPU).digest()
        assert padding == int((model.model.embed_tokens.weight == 0).all(1).sum())
    assert loads == [1]
    assert {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()} == held


def test_what_it_leaves_as_it_is_stays_full_precision(folder: Path) -> None:
    host = host_of(Online(folder).start(), folder)
    stored = {meta.name: meta.dtype for meta in host.checkpoint().stored}
    assert stored[f"{OUT}.weight"] == "float8_e4m3fn"
    assert stored[f"{OUT}.weight_scale"] == "float32"
    assert stored[f"{IGNORED}.weight"] == stored["model.embed_tokens.weight"] == "bfloat16"
    assert f"{IGNORED}.weight_scale" not in stored


def test_holders_of_two_ranks_read_all_of_it_between_them(folder: Path) -> None:
    """Those of columns quantise theirs alone, as SGLang does on each rank."""
    layouts, formats = [], set()
    for rank in range(2):
        host = host_of(Online(folder, rank=rank, num_ranks=2).start(), folder)
        tensors, places = host.checkpoint().tensors, host.places()
        assert places
        formats.add(places.formats[f"{OUT}.weight"].block)
        layouts.append(reads_layout(tensors, (), places.export(places.formats).reads(tensors)))
    (block,) = formats
    whole = next(meta for meta in tensors if meta.name == f"{OUT}.weight")
    assert block == (1, whole.shape[1] // 2)
    assert covers_all(Layout.from_ranks(layouts))
    assert not covers_all(Layout.from_ranks(layouts[:1]))


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("update", [read_and_quantised, bucket_by_bucket])
def test_its_holder_writes_the_same_bytes_where_they_live(
    update: Callable[..., HolderDigests],
    rank: int,
    num_ranks: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With doubles of its kernels. It maps parameters as bytes, and has their places from the rank."""
    use_doubles(monkeypatch)
    model = Online(folder, rank=rank, num_ranks=num_ranks).start()
    host = host_of(model, folder)
    metas, places = host.checkpoint().tensors, host.places()
    assert places
    tensors = trained(folder, 1)
    made = update(metas, places.export(places.formats), mapped(model), tensors)
    wanted = Online(folder, rank=rank, num_ranks=num_ranks)
    with torch.no_grad():
        wanted.load_weights(tensors.items())
    parameters = dict(parameters_of(wanted.start()))
    assert [name for name, each in parameters_of(model) if not same_bits(each, parameters[name])] == []
    places.require(made.stored)


def test_parameters_that_moved_are_found_again(folder: Path) -> None:
    model = Online(folder).start()
    host = host_of(model, folder)
    host.checkpoint()
    before = host.places()
    assert host.places() is before
    layer: Any = model.get_submodule(OUT)
    layer.weight.data = layer.weight.data.t().clone().t()
    after = host.places()
    assert after
    assert after is not before
    assert after.addresses()[f"{OUT}.weight"] == layer.weight.data_ptr()


def test_a_tensor_that_does_not_come_fails_the_update_by_name(folder: Path) -> None:
    host = host_of(Online(folder).start(), folder)
    host.checkpoint()
    tensors = trained(folder, 1)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    loader = host.loader(stored=False)
    with torch.no_grad():
        loader.load(iter(tensors.items()))
    with pytest.raises(RuntimeError, match=r"up_proj\.weight.* did not come"):
        loader.finish()


def test_a_rank_declares_what_it_quantises(folder: Path) -> None:
    layout = Rank("sglang", 0, CPU, host_of(Online(folder).start(), folder)).layout().rank_layout()
    assert layout.buffers == ()
    assert "become float8_e4m3fn with a scale for 1 x all" in layout.converts


Change = Callable[[Any], object]


def method(**attributes: object) -> Change:
    return lambda model: vars(model.get_submodule(OUT).quant_method).update(attributes)


def replaced(name: str, data: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Have a parameter of a layer be otherwise."""

    def change(model: Any) -> None:
        layer = model.get_submodule(OUT)
        setattr(layer, name, nn.Parameter(data(getattr(layer, name).data), requires_grad=False))

    return change


def other_rounding(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With a quotient that is rounded correctly, as SGLang's kernels for other GPUs have."""
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return (weight.float() / scales).to(FP8), scales


def doubled(model: Any) -> None:
    load = model.load_weights
    model.load_weights = lambda weights: load((name, tensor * 2) for name, tensor in weights)


def backwards(model: Any) -> None:
    """Have a loader put the columns of a matrix in another order."""
    layer = model.get_submodule(OUT)

    def load(param: Any, tensor: torch.Tensor, part: str) -> None:
        half = tensor.shape[1] // 2
        param.data[:, :half].copy_(tensor[:, half:])
        param.data[:, half:].copy_(tensor[:, :half])

    layer.weight_loader_v2 = load


class ColumnParallelLinearWithLoRA(nn.Module): ...


class AwqLinearMethod(SimpleNamespace): ...


REFUSED: dict[str, tuple[Change, str]] = {
    "marlin": (method(use_marlin=True), r"o_proj: .*SGLANG_FORCE_FP8_MARLIN"),
    "groups": (method(block_quant=True), r"o_proj: it is quantised in groups \(MXFP8\)"),
    "one scale": (replaced("weight_scale", lambda scales: scales.max()), r"o_proj: it has one scale for all"),
    "no scale": (replaced("weight_scale", lambda scales: scales.half()), r"o_proj: .*scales torch\.float16"),
    "whole": (replaced("weight", lambda weight: weight.to(torch.bfloat16)), r"o_proj: it holds .*bfloat16"),
    "order": (replaced("weight", lambda weight: weight.contiguous()), r"o_proj: its rows lie between others"),
    "AMX": (
        lambda model: vars(model.get_submodule(OUT)).update(use_intel_amx_backend=True),
        r"packed for AMX",
    ),
    "cache": (
        lambda model: vars(model.get_submodule("model.layers.0.self_attn.attn")).update(k_scale_float=0.1),
        r"drawn at random",
    ),
    "derived": (lambda model: vars(model).update(post_load_weights=None), r"derives tensors"),
    "beside": (
        lambda model: vars(model.get_submodule(OUT)).update(packed=torch.zeros(8)),
        r"o_proj\.packed is no parameter",
    ),
    "other layer": (
        lambda model: setattr(model.get_submodule(IGNORED), "quant_method", AwqLinearMethod()),
        r"AwqLinearMethod may repack",
    ),
    "computes": (doubled, r"its loader runs aten\.mul\.Tensor on "),
    "columns": (backwards, r"o_proj\.weight has rows that are not those of .*o_proj\.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_in_place_is_refused_when_connecting(case: str, folder: Path) -> None:
    change, reason = REFUSED[case]
    model = Online(folder).start()
    host_of(model, folder).checkpoint()
    change(model)
    held = {name: id(each) for name, each in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"(?s){reason}.*vLLM") as raised:
        host_of(model, folder).checkpoint()
    assert (raised.value.field, raised.value.value) == ("options.quantization", "fp8")
    assert {name: id(each) for name, each in model.named_parameters()} == held, "a trace left its own"


def test_a_quantiser_with_other_bytes_is_refused(folder: Path) -> None:
    """As on GPUs for which SGLang's kernels are compiled otherwise."""
    model = Online(folder, lambda: Fp8LinearMethod(quantize=other_rounding)).start()
    with pytest.raises(ConfigError, match=r"other bytes than are known, on a CPU. .* Hopper .*vLLM"):
        host_of(model, folder).checkpoint()


def test_adapters_are_refused_by_their_option(folder: Path) -> None:
    model = Online(folder, W8A8Fp8LinearMethod).start()
    model.add_module("wrapped", ColumnParallelLinearWithLoRA())
    with pytest.raises(ConfigError, match=r"options\.enable_lora"):
        host_of(model, folder).checkpoint()
