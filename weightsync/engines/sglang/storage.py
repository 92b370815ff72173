"""Tells by SGLang's layers and their methods whether live parameters hold the loaders' bytes.

Sources: SGLang's ``layers/quantization/fp8.py``, ``w8a8_fp8.py``, ``kv_cache.py`` and
``compressed_tensors/`` of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weightsync.engines.loading.live_digest import obstacle
from weightsync.errors import ConfigError
from weightsync.plan.layout.formats import FIELD, Format

_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_EXPERTS_METHOD = "UnquantizedFusedMoEMethod"
_BLOCK_METHODS = ("Fp8LinearMethod", "Fp8MoEMethod")
_CHANNELS_METHOD, _CHANNELS_EXPERTS = "CompressedTensorsLinearMethod", "CompressedTensorsFusedMoEMethod"
_CHANNELS_SCHEMES = {
    _CHANNELS_METHOD: ("CompressedTensorsW8A8Fp8", "CompressedTensorsW8A8Int8"),
    _CHANNELS_EXPERTS: ("CompressedTensorsW8A8Fp8MoE",),
}
"""SGLang's schemes of compressed-tensors that keep loaded bytes, if each row has a scale."""
_CACHE_METHOD = "Fp8KVCacheMethod"
_ONLINE = {"Fp8LinearMethod": "fp8", "Fp8MoEMethod": "fp8", "W8A8Fp8LinearMethod": "w8a8_fp8"}
"""Methods that may quantise full-precision weights to FP8, and the ``quantization`` that has them."""
_COPIES = ("_weight_fp32",)
"""Where layers keep a copy of a weight that they make once: routers of GLM-4 MoE, in float32."""
_DERIVE = "post_load_weights"
"""SGLang's method of models that derive tensors from weights, as DeepSeek's projections of MLA."""
_PLAIN_RUNNERS = ("triton", "deep_gemm")
"""SGLang's kernels of experts that read weights and scales as they were loaded."""


def stored_otherwise(model: torch.nn.Module, device: torch.device) -> str:
    """Return why live parameters may differ from the loader's bytes; "" if they do not.

    Accepts only models that are known to keep the bytes: without quantization, adapters and offloading, of
    layers that use their weights as they were loaded.
    """
    return _why_not(model, device, _why_not_plain)


def processed_once(model: torch.nn.Module, device: torch.device) -> str:
    """Return why a load cannot repeat SGLang's processing at the start; "" if it can.

    Tensors that a model derives from weights are derived again in place.
    """
    if reason := obstacle(model, device, _why_not_plain):
        return reason
    before = _addresses(model)
    derive_again(model)
    moved = next((name for name, at in _addresses(model).items() if before.get(name) != at), "")
    return f"SGLang derives {moved} in other memory each time, which CUDA graphs do not read" if moved else ""


def derive_again(model: torch.nn.Module) -> None:
    """Have a model derive tensors from weights, as SGLang does after it has drawn dummies."""
    if hasattr(model, _DERIVE):
        getattr(model, _DERIVE)()


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    """Return the addresses of all tensors that modules hold."""
    return {
        f"{path}.{name}": each.data_ptr()
        for path, module in model.named_modules()
        for name, each in {**vars(module), **module._parameters, **module._buffers}.items()
        if isinstance(each, torch.Tensor)
    }


def require_no_copies(model: torch.nn.Module) -> None:
    """Raise ConfigError if a layer computes with a copy of a weight, which updates leave as it was."""
    for path, module in model.named_modules():
        if found := next((name for name in _COPIES if hasattr(module, name)), ""):
            remedy = f"SGLang makes {path}.{found} once and no update reaches it: serve this model with vLLM"
            raise ConfigError("model", type(model).__name__, remedy)


def require_kept(model: torch.nn.Module, device: torch.device, formats: Mapping[str, Format]) -> None:
    """Raise ConfigError unless live parameters are a quantised checkpoint's tensors, or views of them.

    This accepts all layers that `stored_otherwise` accepts, and layers whose kernels read FP8 blocks, or rows
    with a scale per row, as loaded. `formats` are the formats of the checkpoint's quantised weights.
    """
    for name, form in formats.items():
        if form.rule != "fp8" and not _is_in_channels(form):
            remedy = (
                "serve this format with vLLM, or give SGLang quant_method: fp8 with weight_block_size, "
                "or compressed-tensors with strategy: channel, in FP8 or int8"
            )
            raise ConfigError(f"{FIELD} of {name}", str(form), remedy)
    method = next(iter(formats.values())).rule
    if _has_adapters(model):
        remedy = f"leave it out: with it, the layers of {FIELD} have other names"
        raise ConfigError("options.enable_lora", True, remedy)
    if reason := _why_not(model, device, _why_not_kept):
        raise ConfigError(FIELD, method, f"{reason}; or serve this model with vLLM")


def transposed_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers, by path, that a compressed-tensors checkpoint fills and SGLang then transposes."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__ == _CHANNELS_METHOD
    }


def _is_in_channels(form: Format) -> bool:
    return form.rule == "compressed-tensors" and form.block == (1, 0) and not form.packed


def online_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers that SGLang quantised when it started, by path."""
    return {path: module for path, module in model.named_modules() if _is_online(module)}


def online_option(layers: Mapping[str, torch.nn.Module]) -> tuple[str, str]:
    """Return the option with which SGLang quantises `online_layers`, and the option's value."""
    kind = type(next(iter(layers.values())).quant_method).__name__
    return "options.quantization", _ONLINE[kind]


def require_online(
    model: torch.nn.Module, device: torch.device, layers: Mapping[str, torch.nn.Module]
) -> None:
    """Raise ConfigError unless `online_layers` hold FP8 and other layers hold the loaded bytes."""
    option = online_option(layers)
    if _has_adapters(model):
        remedy = f"leave it out: with it, the layers that {option[0]} has quantised have other names"
        raise ConfigError("options.enable_lora", True, remedy)
    if reason := _why_not(model, device, _why_not_online):
        raise ConfigError(*option, f"{reason}; or serve this model with vLLM")


def _has_adapters(model: torch.nn.Module) -> bool:
    return any(type(module).__name__.endswith("WithLoRA") for module in model.modules())


def _is_online(module: torch.nn.Module) -> bool:
    method: Any = getattr(module, "quant_method", None)
    configs = (getattr(method, name, None) for name in ("quant_config", "quantization_config"))
    return type(method).__name__ in _ONLINE and any(
        getattr(config, "is_checkpoint_fp8_serialized", True) is False for config in configs
    )


def _why_not(model: torch.nn.Module, device: torch.device, of: Callable[[torch.nn.Module], str]) -> str:
    if hasattr(model, _DERIVE):
        return f"{type(model).__name__} derives tensors from its weights"
    return obstacle(model, device, of)


def _why_not_plain(module: torch.nn.Module) -> str:
    if getattr(module, "use_intel_amx_backend", False):
        return "weights are packed for AMX"
    method: Any = getattr(module, "quant_method", None)
    kind = type(method).__name__
    if method is None or kind in _PLAIN_METHODS:
        return ""
    if kind != _EXPERTS_METHOD:
        return f"{kind} may repack weights"
    if getattr(method, "w13_swiglu_interleaved", False):
        return "rows of its experts lie in another order: leave SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED unset"
    return "FlashInfer's TRT-LLM kernels rearrange experts" if method.use_flashinfer_trtllm_moe else ""


def _why_not_kept(module: torch.nn.Module) -> str:
    method: Any = getattr(module, "quant_method", None)
    kind = type(method).__name__
    if kind == _CACHE_METHOD:
        return _why_not_cache(module)
    if kind not in (*_BLOCK_METHODS, *_CHANNELS_SCHEMES) or getattr(module, "use_intel_amx_backend", False):
        return _why_not_plain(module)
    if reason := _why_in_another_order(method):
        return reason
    if kind in _CHANNELS_SCHEMES:
        return _why_not_channels(module.scheme, kind)
    if not method.block_quant or method.use_mxfp8 or getattr(method, "is_fp4_expert", False):
        return f"{kind} has another format than FP8 in blocks with float32 scales"
    if any(getattr(each, "format_ue8m0", False) for each in module.parameters(recurse=False)):
        return (
            "DeepGEMM's kernels have it quantised again, with scales that are powers of two: "
            "fp8_gemm_runner_backend='triton' and moe_runner_backend='triton' keep the checkpoint's"
        )
    return _why_not_experts(method) if kind == "Fp8MoEMethod" else ""


def _why_not_channels(scheme: Any, kind: str) -> str:  # noqa: ANN401 - SGLang's
    if type(scheme).__name__ not in _CHANNELS_SCHEMES[kind]:
        return f"{type(scheme).__name__} may repack weights, as on GPUs before compute capability 8.9"
    return _why_not_experts(scheme) if kind == _CHANNELS_EXPERTS else ""


def _why_not_cache(module: torch.nn.Module) -> str:
    # Dummy weights draw these scales, too. Scales that are not positive become 1, as without dummy weights.
    drawn = any(getattr(module, name) != 1.0 for name in ("k_scale_float", "v_scale_float"))
    return "the scales of its cache were drawn at random for the start" if drawn else ""


def _why_in_another_order(method: Any) -> str:  # noqa: ANN401 - SGLang's
    if torch.version.hip:
        return "on AMD, SGLang puts weights in another order"
    if getattr(method, "use_marlin", False):
        return "Marlin's kernels want weights in another order: leave SGLANG_FORCE_FP8_MARLIN unset"
    return ""


def _why_not_online(module: torch.nn.Module) -> str:
    if type(getattr(module, "quant_method", None)).__name__ == _CACHE_METHOD:
        return _why_not_cache(module)
    if not _is_online(module) or getattr(module, "use_intel_amx_backend", False):
        return _why_not_plain(module)
    method: Any = module.quant_method
    if reason := _why_in_another_order(method):
        return reason
    if getattr(method, "block_quant", False):
        return "it is quantised in groups (MXFP8): quantization='fp8' has none"
    if not hasattr(module, "w13_weight"):
        return _why_not_rows(module)
    return _why_not_experts(method) or _why_not_stacks(module)


def _why_not_stacks(module: torch.nn.Module) -> str:
    """Return why a layer has no two stacks of experts in FP8 with float32 scales; "" if it has."""
    for name in ("w13_weight", "w2_weight"):
        stack, scales = getattr(module, name), getattr(module, f"{name}_scale", None)
        if not isinstance(scales, torch.Tensor):
            return f"its {name} has no {name}_scale"
        held = stack.dtype, stack.ndim, scales.dtype, tuple(scales.shape)
        if held != (torch.float8_e4m3fn, 3, torch.float32, stack.shape[:1]):
            given = f"{stack.dtype} {tuple(stack.shape)}, and scales {scales.dtype} {tuple(scales.shape)}"
            return f"its {name} holds {given}"
        if not (stack.is_contiguous() and scales.is_contiguous()):
            return f"experts of its {name} lie between others"
    return ""


def _why_not_rows(module: torch.nn.Module) -> str:
    """Return why a layer has no transposed FP8 matrix with a float32 scale for each row; "" if it has."""
    weight, scales = (getattr(module, name, None) for name in ("weight", "weight_scale"))
    if not isinstance(weight, torch.Tensor) or not isinstance(scales, torch.Tensor):
        return "it has no weight with a weight_scale"
    if weight.ndim == 2 and weight.shape[1] > 1 and scales.numel() == 1:
        return "it has one scale for all rows, as where SGLang's CUTLASS kernels do not run"
    held = weight.dtype, weight.ndim, scales.dtype, tuple(scales.shape)
    if held != (torch.float8_e4m3fn, 2, torch.float32, (1, weight.shape[-1])):
        given = f"{weight.dtype} {tuple(weight.shape)}, and scales {scales.dtype} {tuple(scales.shape)}"
        return f"it holds {given}"
    if not (weight.t().is_contiguous() and scales.is_contiguous()):
        return "its rows lie between others"
    return ""


def _why_not_experts(method: Any) -> str:  # noqa: ANN401 - SGLang's
    backend = getattr(getattr(method, "runner", None), "runner_backend", None)
    name = getattr(backend, "value", None)
    if name in _PLAIN_RUNNERS:
        return ""
    return f"backend {name} may rearrange experts: moe_runner_backend='triton' does not"
