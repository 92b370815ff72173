"""Which layers of vLLM may be written live, with fakes of them, and how stacked experts are handed over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightsync.engines.serving.engine_ranks import EngineRanks
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.engines.vllm.storage import quantized_again, stored_otherwise
from weightsync.memory.stacked_experts import as_loaded
from weightsync.plan import RankLayout, TensorMeta
from weightsync.plan.layout.layout_table import LayoutTable

GPU = torch.device("cuda", 0)


class UnquantizedLinearMethod: ...


class Fp8LinearMethod: ...


class UnquantizedFusedMoEMethod(nn.Module):
    """A module of its own, with the hook."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.unquantized_backend = SimpleNamespace(name=backend)

    def process_weights_after_loading(self) -> None: ...


class FusedMoEModularMethod(nn.Module):
    """Where LoRA wraps experts. The hook does nothing."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.old_quant_method = UnquantizedFusedMoEMethod(backend)

    def process_weights_after_loading(self) -> None: ...


class Attention(nn.Module):
    def process_weights_after_loading(self) -> None: ...


class EncoderAttention(Attention): ...


class MLAAttention(nn.Module):
    def process_weights_after_loading(self) -> None: ...


class Layer(nn.Module):
    def __init__(self, method: object) -> None:
        super().__init__()
        self.quant_method = method


class LinearWithLoRA(nn.Module):
    """Has its layer's attributes, as vLLM's."""

    def __init__(self, base_layer: Layer) -> None:
        super().__init__()
        self.base_layer, self.quant_method = base_layer, base_layer.quant_method


def runner(*layers: nn.Module, quantization: str | None = None):
    return SimpleNamespace(
        model_config=SimpleNamespace(quantization=quantization),
        get_model=lambda: nn.Sequential(*layers),
    )


@pytest.mark.parametrize(
    "layer",
    [
        Layer(UnquantizedLinearMethod()),
        Layer(None),
        LinearWithLoRA(Layer(UnquantizedLinearMethod())),
        Layer(UnquantizedFusedMoEMethod("TRITON")),
        Layer(FusedMoEModularMethod("TRITON")),
        Attention(),
        EncoderAttention(),
        nn.SiLU(),
    ],
)
def test_plain_layers_are_written_live(layer: nn.Module) -> None:
    assert stored_otherwise(runner(layer), GPU) == ""


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Layer(Fp8LinearMethod()), "1: Fp8LinearMethod may repack"),
        (Layer(UnquantizedFusedMoEMethod("FLASHINFER_CUTLASS")), "1: backend FLASHINFER_CUTLASS"),
        (Layer(FusedMoEModularMethod("AITER")), "1: backend AITER"),
        (MLAAttention(), "1: MLAAttention processes"),
        (nn.Linear(2, 2), "1.weight is not on cuda:0"),
    ],
)
def test_others_are_reloaded(layer: nn.Module, says: str) -> None:
    assert stored_otherwise(runner(Attention(), layer), GPU).startswith(says)


def test_engines_that_quantise_are_reloaded() -> None:
    assert "fp8" in stored_otherwise(runner(quantization="fp8"), GPU)


def test_a_cpu_is_reloaded() -> None:
    assert "cpu" in stored_otherwise(runner(), torch.device("cpu"))


def test_a_stack_is_handed_over_one_by_one() -> None:
    shapes = {"m.experts.gate_up_proj": (2, 6, 4), "m.experts.down_proj": (2, 4, 3)}
    stack = torch.arange(48).view(2, 6, 4)
    views = dict(as_loaded("m.experts.gate_up_proj", stack, shapes))
    assert list(views) == [f"m.experts.{e}.{part}_proj.weight" for e in (0, 1) for part in ("gate", "up")]
    assert torch.equal(views["m.experts.1.up_proj.weight"], stack[1, 3:])
    assert all(view.untyped_storage().data_ptr() == stack.data_ptr() for view in views.values())
    down = torch.arange(24).view(2, 4, 3)
    handed = dict(as_loaded("m.experts.down_proj", down, shapes))
    assert torch.equal(handed["m.experts.1.down_proj.weight"], down[1])


@pytest.mark.parametrize(
    "shapes",
    [
        {"m.experts.gate_up_proj": (2, 4, 6), "m.experts.down_proj": (2, 3, 4)},  # transposed
        {"m.experts.gate_up_proj": (2, 6, 4)},
    ],
)
def test_other_stacks_stay_whole(shapes: dict[str, tuple[int, ...]]) -> None:
    stack = torch.zeros(shapes["m.experts.gate_up_proj"])
    ((name, handed),) = as_loaded("m.experts.gate_up_proj", stack, shapes)
    assert name == "m.experts.gate_up_proj"
    assert handed is stack


def test_ranks_that_cannot_all_be_written_live_all_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = TensorMeta("w", "float32", (4,))
    whole, live = (LayoutTable.of(RankLayout((meta,), (), buffers=each)) for each in ((), (meta,)))
    found = [live, whole]
    asked: list[str] = []

    def on_ranks(_: VllmEngine, method: str) -> list[LayoutTable]:
        asked.append(method)
        return found if method == "layout" else [whole, whole]

    monkeypatch.setattr(VllmEngine, "on_ranks", on_ranks)
    engine = VllmEngine.__new__(VllmEngine)
    EngineRanks.__init__(engine, "e0")
    assert engine.layout() == [whole, whole]
    assert asked == ["layout", "reload"]
    found[:] = [live, live]
    assert engine.layout() == [live, live]
    assert asked[2:] == ["layout"]


@pytest.mark.parametrize("falls_back", [False, True])
@pytest.mark.parametrize("attribute", ["quant_method", "scheme"])
def test_layers_that_deep_gemm_has_quantised_again_are_named_with_the_remedy(
    attribute: str, falls_back: bool
) -> None:
    """Where FlashInfer is installed, vLLM's kernel is FlashInfer's, and falls back to DeepGEMM's."""
    model, layer = nn.Module(), nn.Module()
    model.add_module("down_proj", layer)
    assert quantized_again(model) == ""
    for again in (False, True):
        kernel = SimpleNamespace(use_deep_gemm_e8m0=again)
        kernel = SimpleNamespace(fallback=kernel) if falls_back else kernel
        setattr(layer, attribute, SimpleNamespace(fp8_linear=kernel))
        assert ("have down_proj quantised again" in quantized_again(model)) == again
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in quantized_again(model)
