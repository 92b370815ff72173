"""Tells by vLLM's layers and their methods whether live parameters hold the loaders' bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weightsync.engines.loading.live_digest import obstacle

if TYPE_CHECKING:
    from weightsync.engines.vllm.api import ModelRunner

# These keep parameters as their loaders write them. For mixture-of-experts layers it depends on the backend.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_EXPERTS_METHOD, _PLAIN_BACKENDS = "UnquantizedFusedMoEMethod", ("TRITON", "BATCHED_TRITON")
_MODULAR = "FusedMoEModularMethod"
"""Runs the kernel of another method, which has processed the weights."""


def stored_otherwise(runner: ModelRunner, device: torch.device) -> str:
    """Return why live parameters may differ from the loader's bytes; "" if they do not.

    Accepts only models that are known to keep the bytes: on GPUs, without quantization and offloading, of
    layers that use their weights as they were loaded.
    """
    if device.type != "cuda":
        return f"on {device.type}, vLLM packs weights"
    if runner.model_config.quantization is not None:
        return f"the weights are quantized ({runner.model_config.quantization})"
    return why_not_live(runner.get_model(), device)


def why_not_live(model: torch.nn.Module, device: torch.device) -> str:
    """Return which layer may hold other bytes than the loader's; "" if none does."""
    return obstacle(model, device, _why_not_plain)


def _why_not_plain(module: torch.nn.Module) -> str:
    method: Any = getattr(module, "quant_method", None)
    if type(method).__name__ == _MODULAR:
        method = method.old_quant_method
    kind = type(method).__name__
    if method is not None and kind == _EXPERTS_METHOD:
        backend: str = method.unquantized_backend.name
        return "" if backend in _PLAIN_BACKENDS else f"backend {backend} rearranges experts"
    if method is not None and kind not in _PLAIN_METHODS:
        return f"{kind} may repack weights"
    # Attention has the hook for quantized caches, experts' methods were checked above; others derive tensors.
    known = ("Attention", _EXPERTS_METHOD, _MODULAR)
    hooked = hasattr(module, "process_weights_after_loading")
    if hooked and not any(cls.__name__ in known for cls in type(module).__mro__):
        return f"{type(module).__name__} processes its weights after loading"
    return ""


def quantized_again(model: torch.nn.Module) -> str:
    """Return why live FP8 blocks are not a checkpoint's, and how to have these; "" if they may be."""
    for name, module in model.named_modules():
        holders = (getattr(module, attribute, None) for attribute in ("quant_method", "scheme"))
        kernels = [getattr(holder, "fp8_linear", None) for holder in holders]
        # FlashInfer's kernel leaves large batches to DeepGEMM's.
        kernels += [getattr(kernel, "fallback", None) for kernel in kernels]
        if any(getattr(kernel, "use_deep_gemm_e8m0", False) for kernel in kernels):
            return (
                f"DeepGEMM's kernels have {name} quantised again, with scales that are powers of two; "
                "VLLM_USE_DEEP_GEMM_E8M0=0 keeps the checkpoint's, VLLM_USE_DEEP_GEMM=0 serves without them"
            )
    return ""
