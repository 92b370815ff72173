"""The proof that weights are quantised here to the bytes of a vLLM that quantises as it loads.

vLLM's own method quantises a random matrix of each size that the model has.

Sources: vLLM's ``layers/quantization/online/fp8.py`` of 0.24 and 0.32.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.engines.loader_trace import UnprovableError
from weightsync.engines.quantiser_bytes import are_same, random_matrix
from weightsync.engines.vllm.online import LAYER
from weightsync.engines.wrapped import is_lora
from weightsync.memory.quantize import quantize

_METHOD = "Fp8PerTensorOnlineLinearMethod"
_MOST_ROWS = 2560
"""Of a random matrix: its rows are quantised alike."""
_REDUCTION = "amax_for_tp_weight_quant"
"""What later versions of vLLM have, by which the ranks of a layer agree on a scale."""


def online_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the linear layers that vLLM quantises to FP8 as it loads, with one scale each, by path."""
    return {path: module for path, module in model.named_modules() if _kind(module) == _METHOD}


def require_online(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], created: Mapping[str, torch.Tensor]
) -> None:
    """Raise UnprovableError unless `layers` are known, and vLLM gives our bytes for each of their sizes.

    Args:
        layers: the `online_layers` of the model.
        created: the matrix that vLLM's loader fills of each, by path.
    """
    for path, module in model.named_modules():
        if is_lora(module):
            raise UnprovableError(f"{path}: adapters are served, which is not known with online FP8")
        if hasattr(module, "cpu_linear"):
            raise UnprovableError(f"{path}: its kernel reads weights that were packed for a CPU")
        kind = _kind(module)
        if kind != _METHOD and ("Online" in kind or "Experts" in kind):
            raise UnprovableError(f"{path}: what {kind} makes of weights is not known")
    for path, layer in layers.items():
        if reason := _why_not(layer, created[path]):
            raise UnprovableError(f"{path}: {reason}")
    _require_its_bytes(layers, created)


def _kind(module: torch.nn.Module) -> str:
    return type(getattr(module, "quant_method", None)).__name__


def _why_not(layer: Any, created: torch.Tensor) -> str:  # noqa: ANN401 - vLLM's
    """Return why a layer has no transposed FP8 matrix with one scale of its own; "" if it has."""
    method, weight, scale = layer.quant_method, layer.weight, getattr(layer, "weight_scale", None)
    if getattr(method, "requantization_source", None) is not None:
        return "it is made of weights that are quantised already"
    if getattr(layer, "tp_size", 1) > 1 and hasattr(sys.modules[type(method).__module__], _REDUCTION):
        return "its ranks agree on a scale as they load it"
    if not isinstance(scale, torch.nn.Parameter) or (scale.dtype, scale.numel()) != (torch.float32, 1):
        return "it has no single float32 weight_scale"
    if (weight.dtype, weight.shape) != (torch.float8_e4m3fn, created.t().shape):
        return f"it holds {weight.dtype} {tuple(weight.shape)}"
    return "" if weight.t().is_contiguous() else "its rows lie between others"


def _require_its_bytes(layers: Mapping[str, torch.nn.Module], created: Mapping[str, torch.Tensor]) -> None:
    seen: set[tuple[int, int]] = set()
    for path, layer in layers.items():
        loaded = created[path]
        size = min(loaded.shape[0], _MOST_ROWS), loaded.shape[1]
        if size in seen:
            continue
        seen.add(size)
        if not _makes_our_bytes(layer, random_matrix(*size, _device(layer), loaded.dtype)):
            raise UnprovableError(f"{path}: vLLM quantises a random matrix like it to other bytes")
        if _device(layer).type == "cuda":
            torch.cuda.empty_cache()  # trainers on the same GPU may need it


def _device(layer: torch.nn.Module) -> torch.device:
    return layer.get_parameter("weight").device


def _makes_our_bytes(layer: Any, matrix: torch.Tensor) -> bool:  # noqa: ANN401 - vLLM's
    """Whether the method of a layer makes our bytes of a matrix. Raises UnprovableError if it fails."""
    made: Any = torch.nn.Module()
    made.weight, made.tp_size = torch.nn.Parameter(matrix.clone(), requires_grad=False), 1
    method = copy.copy(layer.quant_method)
    if hasattr(method, "fp8_linear"):
        method.fp8_linear = copy.copy(method.fp8_linear)  # it keeps sizes of the layer that it processed
    try:
        method.process_weights_after_loading(made)
    except Exception as error:
        raise UnprovableError(f"vLLM quantises no random matrix: {type(error).__name__}: {error}") from error
    values, scale = (each for _, each in quantize(matrix, LAYER))
    return are_same(made.weight.t(), values) and are_same(made.weight_scale.reshape(-1), scale)
