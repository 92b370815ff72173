"""The proof that weights are quantised here to the bytes of a vLLM that quantises as it loads.

vLLM's own method quantises a random matrix, or random experts, of each size that the model has.

Sources: vLLM's ``layers/quantization/fp8.py`` and ``layers/quantization/online/fp8.py`` of 0.24 and 0.32.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.wrapped import is_lora
from weightsync.engines.quantised.online_places import STACKS, are_same, random_matrix
from weightsync.engines.vllm.online import LAYER, Loaded
from weightsync.quantising.quantize import quantize

_LINEAR = "Fp8PerTensorOnlineLinearMethod"
_EXPERTS = ("Fp8OnlineMoEMethod", "Fp8PerTensorOnlineMoEMethod")
"""The names of vLLM's methods for experts: of 0.24 by the option ``fp8``, and of later versions."""
_MOST_ROWS = 2560
"""The most rows of a random matrix, since all rows are quantised alike."""
_REDUCTIONS = ("amax_for_tp_weight_quant", "amax_for_moe_weight_quant")
"""Functions of later versions of vLLM by which the ranks of a layer agree on a scale."""


def online_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers that vLLM quantises to FP8 as it loads, by path.

    A layer has one scale; stacks of experts have two scales per expert.
    """
    known = (_LINEAR, *_EXPERTS)
    return {path: module for path, module in model.named_modules() if _kind(module) in known}


def loaded_weights(
    layers: Mapping[str, torch.nn.Module], loaded: Mapping[str, Mapping[str, torch.Tensor]]
) -> Loaded:
    """Return the tensors of `layers` that vLLM's loader fills and vLLM quantises.

    Args:
        loaded: all tensors that vLLM's loader fills according to vLLM, by path and last name.

    Raises UnprovableError if vLLM does not list such tensors.
    """
    found = {}
    for path, layer in layers.items():
        leaves = ("weight",) if _kind(layer) == _LINEAR else STACKS
        its = loaded.get(path, {})
        if not its.keys() >= {*leaves}:
            raise UnprovableError(f"vLLM does not say what it loads of {path}")
        found[path] = {leaf: its[leaf] for leaf in leaves}
    return found


def require_online(model: torch.nn.Module, loaded: Loaded) -> None:
    """Raise UnprovableError unless `loaded` layers are known, and vLLM gives our bytes for each size.

    Args:
        loaded: the tensors of all `online_layers` of the model.
    """
    for path, module in model.named_modules():
        if is_lora(module):
            raise UnprovableError(f"{path}: adapters are served, which is not known with online FP8")
        if hasattr(module, "cpu_linear"):
            raise UnprovableError(f"{path}: its kernel reads weights that were packed for a CPU")
        kind = _kind(module)
        if path not in loaded and ("Online" in kind or "Experts" in kind):
            raise UnprovableError(f"{path}: what {kind} makes of weights is not known")
    layers = {path: model.get_submodule(path) for path in loaded}
    for path, layer in layers.items():
        if reason := _why_not(layer, loaded[path]):
            raise UnprovableError(f"{path}: {reason}")
    _require_its_bytes(layers, loaded)


def _kind(module: torch.nn.Module) -> str:
    return type(getattr(module, "quant_method", None)).__name__


def _why_not(layer: Any, loaded: Mapping[str, torch.Tensor]) -> str:  # noqa: ANN401 - vLLM's
    """Return why a layer has no FP8 with its own scales in the known form; "" if it has."""
    method = layer.quant_method
    if getattr(method, "requantization_source", None) is not None:
        return "it is made of weights that are quantised already"
    # Experts that each rank has whole are not cut, whatever the layers beside them are.
    cut = layer if _kind(layer) == _LINEAR else getattr(method, "moe", layer)
    agrees = any(hasattr(sys.modules[type(method).__module__], each) for each in _REDUCTIONS)
    if getattr(cut, "tp_size", 1) > 1 and agrees:
        return "its ranks agree on a scale as they load it"
    if _kind(layer) == _LINEAR:
        return _why_not_linear(layer, loaded["weight"])
    return next(filter(None, (_why_not_stack(layer, leaf, each) for leaf, each in loaded.items())), "")


def _why_not_linear(layer: Any, loaded: torch.Tensor) -> str:  # noqa: ANN401 - vLLM's
    weight, scale = layer.weight, getattr(layer, "weight_scale", None)
    if not isinstance(scale, torch.nn.Parameter) or (scale.dtype, scale.numel()) != (torch.float32, 1):
        return "it has no single float32 weight_scale"
    rows, columns = loaded.shape
    if weight.dtype != torch.float8_e4m3fn or weight.shape[0] != columns or weight.shape[1] < rows:
        return f"it holds {weight.dtype} {tuple(weight.shape)}"
    return "" if weight.t().is_contiguous() else "its rows lie between others"


def _why_not_stack(layer: Any, leaf: str, loaded: torch.Tensor) -> str:  # noqa: ANN401 - vLLM's
    stack, scales = getattr(layer, leaf), getattr(layer, f"{leaf}_scale", None)
    held = (scales.dtype, scales.shape) if isinstance(scales, torch.nn.Parameter) else ()
    if held != (torch.float32, loaded.shape[:1]):
        return f"it has no {leaf}_scale with a float32 for each expert"
    if (stack.dtype, stack.shape) != (torch.float8_e4m3fn, loaded.shape):
        return f"its {leaf} holds {stack.dtype} {tuple(stack.shape)}"
    return "" if stack.is_contiguous() else f"experts of its {leaf} lie between others"


def _require_its_bytes(layers: Mapping[str, torch.nn.Module], loaded: Loaded) -> None:
    seen: set[tuple[object, ...]] = set()
    for path, layer in layers.items():
        its = loaded[path]
        sizes = [_size(each) for each in its.values()]
        if (kind := (_kind(layer), *sizes)) in seen:
            continue
        seen.add(kind)
        device = layer.get_parameter(next(iter(its))).device
        drawn = {
            leaf: random_matrix(*size, device, each.dtype)
            for (leaf, each), size in zip(its.items(), sizes, strict=True)
        }
        if not (_makes_our_matrix if kind[0] == _LINEAR else _makes_our_experts)(layer, drawn):
            raise UnprovableError(f"{path}: vLLM quantises a random matrix like it to other bytes")
        if device.type == "cuda":
            torch.cuda.empty_cache()  # trainers on the same GPU may need it


def _size(loaded: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of a matrix, as many as are compared, or of an expert in a stack."""
    *stacked, rows, columns = loaded.shape
    return (rows if stacked else min(rows, _MOST_ROWS)), columns


def _makes_our_matrix(layer: torch.nn.Module, drawn: Mapping[str, torch.Tensor]) -> bool:
    """Return True if the method of a linear layer makes our bytes of a matrix."""
    matrix = drawn["weight"]
    made = _processed(layer, drawn, tp_size=1)
    values, scale = (each for _, each in quantize(matrix, LAYER))
    found, rows = made.weight.t(), len(matrix)
    # The kernel may need more rows. The first update fills these rows, and no later update does.
    is_same = are_same(found[:rows], values) and not found[rows:].view(torch.uint8).any()
    return is_same and are_same(made.weight_scale.reshape(-1), scale)


def _makes_our_experts(layer: torch.nn.Module, drawn: Mapping[str, torch.Tensor]) -> bool:
    """Return True if a layer's method makes our bytes of two experts.

    The values of one expert are three times as large.
    """
    stacks = {leaf: torch.stack([matrix, matrix.flip(0) * 3]) for leaf, matrix in drawn.items()}
    made = _processed(layer, stacks, num_experts=2, local_num_experts=2, weight_block_size=None)
    for leaf, stack in stacks.items():
        found, scales = getattr(made, leaf), getattr(made, f"{leaf}_scale")
        wanted = [[each for _, each in quantize(expert, LAYER)] for expert in stack]
        values, of_all = (torch.stack(each) for each in zip(*wanted, strict=True))
        if not (are_same(found, values) and are_same(scales, of_all.flatten())):
            return False
    return True


def _processed(
    layer: Any,  # noqa: ANN401 - vLLM's
    weights: Mapping[str, torch.Tensor],
    **attributes: object,
) -> Any:  # noqa: ANN401
    """Return a layer with weights that the method of `layer` processed.

    Raises UnprovableError if the method fails.
    """
    made = torch.nn.Module()
    for leaf, each in weights.items():
        made.register_parameter(leaf, torch.nn.Parameter(each.clone(), requires_grad=False))
    vars(made).update(attributes)
    method = copy.copy(layer.quant_method)
    if hasattr(method, "fp8_linear"):
        method.fp8_linear = copy.copy(method.fp8_linear)  # it keeps sizes of the layer that it processed
    if _kind(layer) != _LINEAR:
        method.get_fused_moe_quant_config = _no_kernel
    try:
        method.process_weights_after_loading(made)
    except Exception as error:
        raise UnprovableError(f"vLLM quantises no random matrix: {type(error).__name__}: {error}") from error
    return made


def _no_kernel(_: torch.nn.Module) -> None:
    """Have a method of vLLM make no kernel for experts: it would take memory, and meet other ranks."""
