"""Where vLLM's reload puts what a quantised checkpoint stores: traced, shown by an update, then written."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.quantised import same_bits
from weightsync.engines.loading.live_digest import parameters_of
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.reload_trace import trace_reload
from weightsync.engines.quantised.stored_loader import StoredLoader, find_places
from weightsync.engines.vllm.reload import LayerwiseReload
from weightsync.memory.tensors import meta_of
from weightsync.plan.layout.formats import Format
from weightsync.quantising.stored_places import StoredPlaces

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
RANK, NUM_RANKS = 1, 2
"""The layers hold the second half of the rows of each tensor, and `d` of its columns."""


class Layer(nn.Module):
    """A fused layer of a rank with float32 scales for blocks of 4 x 4, as vLLM makes it before processing."""

    def __init__(self, parts: str, process: Callable[[Layer], None]) -> None:
        super().__init__()
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        class Method(QuantizeMethodBase):
            def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

            def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
                raise AssertionError("no forward pass here")

            def process_weights_after_loading(self, layer: nn.Module) -> None:
                assert isinstance(layer, Layer)
                process(layer)

        def load_part(param: nn.Parameter, loaded_weight: torch.Tensor, part: str) -> None:
            rows = len(param) // len(parts)
            target = param.data.narrow(0, parts.index(part) * rows, rows)
            axis = int(part == "d" and param.ndim > 1)
            size = target.shape[axis]
            first = RANK * size if loaded_weight.shape[axis] > size else 0  # all ranks have the bias of `d`
            target.copy_(loaded_weight.narrow(axis, first, size))

        self.quant_method = Method()
        self.weight = parameter(torch.zeros(len(parts) * 8, 12, dtype=FP8), load_part)
        self.weight_scale = parameter(torch.zeros(len(parts) * 2, 3), load_part)
        self.bias = parameter(torch.zeros(len(parts) * 8), load_part)  # vLLM loads it where it lives


class Embedding(nn.Module):
    """Six rows of a vocabulary in full precision, padded with zeros."""

    def __init__(self) -> None:
        super().__init__()

        def load_rows(param: nn.Parameter, loaded_weight: torch.Tensor, part: str) -> None:
            param.data[:6].copy_(loaded_weight)
            param.data[6:].fill_(0)

        self.weight = parameter(torch.ones(8, 4, dtype=torch.bfloat16), load_rows)


class Model(nn.Module):
    def __init__(self, process: Callable[[Layer], None]) -> None:
        super().__init__()
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        self.embed, self.qkv, self.down = Embedding(), Layer("qkv", process), Layer("d", process)
        self.head = nn.Module()
        self.head.weight = self.embed.weight  # tied
        record_metadata_for_reloading(self)
        process(self.qkv)
        process(self.down)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part, _, leaf = name.rpartition(".")
            layer = {"embed": self.embed, "d": self.down}.get(part, self.qkv)
            found = getattr(layer, leaf)
            found.weight_loader(found, tensor, part)


def parameter(tensor: torch.Tensor, loader: Callable[..., None]) -> nn.Parameter:
    made = nn.Parameter(tensor, requires_grad=False)
    made.weight_loader = loader  # type: ignore[attr-defined]  # vLLM's
    return made


def transposed(layer: Layer) -> None:
    layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)
    layer.weight_scale = nn.Parameter(layer.weight_scale.data, requires_grad=False)


def kept(layer: Layer) -> None:
    layer.weight.data.copy_(layer.weight.data)


def cloned(layer: Layer) -> None:
    layer.weight_scale = nn.Parameter(layer.weight_scale.data.clone(), requires_grad=False)


def negated(layer: Layer) -> None:
    layer.weight_scale = nn.Parameter(-layer.weight_scale.data, requires_grad=False)


def turned(layer: Layer) -> None:
    layer.weight = nn.Parameter(layer.weight.view(12, -1).t().contiguous().t(), requires_grad=False)


def halved(layer: Layer) -> None:
    layer.weight_scale.data.div_(2)


def read(layer: Layer) -> None:
    layer.largest = layer.weight_scale.max().item()


def filled(layer: Layer) -> None:
    layer.weight_scale = nn.Parameter(torch.ones_like(layer.weight_scale), requires_grad=False)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """Random tensors of both ranks. Scales are bfloat16, as compressed-tensors stores them."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {"embed.weight": torch.randn(6, 4, generator=draw).bfloat16()}
    for part in "qkvd":
        down, across = (1, NUM_RANKS) if part == "d" else (NUM_RANKS, 1)
        tensors[f"{part}.weight"] = torch.randn(down * 8, across * 12, generator=draw).to(FP8)
        tensors[f"{part}.weight_scale"] = torch.randn(down * 2, across * 3, generator=draw).bfloat16()
        tensors[f"{part}.bias"] = torch.randn(down * 8, generator=draw)
    return tensors


STORED = [meta_of(name, tensor) for name, tensor in checkpoint(0).items()]


def reload_of(model: Model) -> LayerwiseReload:
    return LayerwiseReload(model, SimpleNamespace(dtype=torch.bfloat16, quantization="fp8"), CPU)  # type: ignore[arg-type]


def load(loader: LayerwiseReload | StoredLoader, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        loader.load(iter(tensors.items()))
        loader.finish()


def live(model: Model) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in parameters_of(model)}


def places_of(model: Model) -> StoredPlaces:
    segments = trace_reload(model, live(model), STORED, lambda: reload_of(model)).segments
    return StoredPlaces(segments, live(model), STORED, {})


@pytest.mark.parametrize("process", [transposed, kept, cloned])
def test_what_was_traced_is_shown_by_an_update_and_then_written(process: Callable[[Layer], None]) -> None:
    wanted, model = Model(process), Model(process)
    load(reload_of(model), checkpoint(0))
    before = {name: each.clone() for name, each in live(model).items()}
    places = places_of(model)
    assert all(same_bits(live(model)[name], each) for name, each in before.items())
    held = live(model)
    for seed in (1, 2, 3):
        loader = StoredLoader(places, lambda: reload_of(model))
        load(loader, checkpoint(seed))
        assert places.are_right
        load(reload_of(wanted), checkpoint(seed))
        for name, each in live(wanted).items():
            assert same_bits(live(model)[name], each), (seed, name)
            assert live(model)[name].data_ptr() == held[name].data_ptr()


def test_the_engines_loader_is_asked_in_the_first_update_alone() -> None:
    model, calls = Model(transposed), []

    def make() -> LayerwiseReload:
        calls.append(1)
        return reload_of(model)

    places = places_of(model)
    for seed in (1, 2, 3):
        load(StoredLoader(places, make), checkpoint(seed))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (negated, r"runs aten\.neg\.default on q\.weight_scale"),
        (turned, r"runs aten\.clone\.default on q\.weight"),
        (halved, r"runs aten\.div_\.Tensor on q\.weight_scale"),
        (read, r"runs aten\.max\.default on q\.weight_scale"),
        (filled, "weight_scale"),
    ],
)
def test_what_is_more_than_a_copy_is_refused_and_changes_nothing(
    process: Callable[[Layer], None], reason: str
) -> None:
    model = Model(process)
    load(reload_of(model), checkpoint(0))
    before = {name: each.clone() for name, each in live(model).items()}
    with pytest.raises(UnprovableError, match=reason):
        places_of(model)
    assert all(same_bits(live(model)[name], each) for name, each in before.items())
    load(reload_of(model), checkpoint(0))
    assert all(same_bits(live(model)[name], each) for name, each in before.items())


def test_a_tensor_that_the_loader_does_not_take_is_refused() -> None:
    model = Model(transposed)
    with pytest.raises(UnprovableError, match=r"left out down\.bias"):
        trace_reload(model, live(model), STORED[:-1], lambda: reload_of(model))
    load(reload_of(model), checkpoint(0))


def test_a_loader_that_does_otherwise_than_traced_keeps_loading(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(transposed)
    places = places_of(model)
    swapped = checkpoint(1) | {"q.weight": checkpoint(1)["k.weight"], "k.weight": checkpoint(1)["q.weight"]}

    class Swaps(LayerwiseReload):
        def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load((name, swapped[name]) for name, _ in weights)

    config: Any = SimpleNamespace(dtype=torch.bfloat16, quantization="fp8")
    load(StoredLoader(places, lambda: Swaps(model, config, CPU)), checkpoint(1))
    assert places.are_right is False
    assert "the loader stores q.weight otherwise than traced" in caplog.text


def test_a_tensor_that_did_not_come_or_is_not_live_fails_the_update() -> None:
    model = Model(transposed)
    places = places_of(model)
    load(StoredLoader(places, lambda: reload_of(model)), checkpoint(1))
    short = checkpoint(2)
    del short["v.weight_scale"]
    with pytest.raises(RuntimeError, match=r"v\.weight_scale did not come: 1 tensors"):
        load(StoredLoader(places, lambda: reload_of(model)), short)
    loader = StoredLoader(places, lambda: reload_of(model))
    loader.load(checkpoint(2).items())
    with torch.no_grad():
        model.down.weight.view(torch.uint8)[0, 0] ^= 4
    with pytest.raises(RuntimeError, match=r"d\.weight was written, and live memory holds other bytes"):
        loader.finish()
    load(StoredLoader(places, lambda: reload_of(model)), checkpoint(2))


GPU = torch.device("cuda", 0)
BLOCKS = Format(rule="fp8", values="float8_e4m3fn", block=(4, 4))
PACKED = Format(rule="compressed-tensors", values="int4", block=(1, 4), packed=True)


def test_places_are_found_for_a_gpu() -> None:
    model = Model(transposed)
    places = find_places(model, STORED, {"d.weight": BLOCKS}, lambda: reload_of(model), GPU)
    assert places is not None
    assert places.numbers.keys() == {meta.name for meta in STORED}


@pytest.mark.parametrize(
    ("device", "form", "obstacle", "said"),
    [
        (CPU, BLOCKS, "", ""),
        (GPU, PACKED, "", "INFO packed values are put in another order"),
        (GPU, BLOCKS, "they are quantised again", "WARNING they are quantised again"),
    ],
)
def test_no_reload_is_run_where_it_is_known_not_to_help(
    device: torch.device, form: Format, obstacle: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> LayerwiseReload:
        raise AssertionError("a reload")

    caplog.set_level("INFO")
    assert find_places(Model(transposed), STORED, {"d.weight": form}, make, device, obstacle) is None
    level, _, reason = said.partition(" ")
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    assert reason in caplog.text


def test_a_loader_that_computes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(negated)
    assert find_places(model, STORED, {"d.weight": BLOCKS}, lambda: reload_of(model), GPU) is None
    assert "runs aten.neg.default on q.weight_scale" in caplog.text
