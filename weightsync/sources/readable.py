"""Refuses tensors whose bytes cannot be read, or are not their values, by name and while trainers connect."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch.nn.parameter import is_lazy

from weightsync.errors import ConfigError, PlanError
from weightsync.memory.addresses import attached_part
from weightsync.plan import RankLayout


def require_no_flat_parameters(model: torch.nn.Module) -> None:
    """Raise ConfigError if FSDP1 shards parameters: a ``state_dict`` would gather them on all ranks."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, kind) and module.sharding_strategy.name != "NO_SHARD":
            remedy = (
                f"FSDP1 shards {path or 'it'} in flat parameters, which are not read: use fully_shard (FSDP2)"
            )
            raise ConfigError("self.model", type(module).__name__, remedy)


def require_strided(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError for a tensor that has no shape yet, or no strides."""
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise PlanError(name, "it is not initialised: run a batch through the model before connect()")
        if tensor.is_quantized:
            raise PlanError(name, f"it is quantised ({tensor.dtype}): replace it by its dequantize()")
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise PlanError(name, f"its layout is {kind}: replace it by a dense tensor, as of to_dense()")


def require_values(layout: RankLayout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError for a tensor of `layout` whose memory, of `tensors`, does not hold its values."""
    names = {segment.buffer: segment.tensor for segment in layout.segments}
    parts = [attached_part(tensors[buffer]) for buffer in names]
    for (buffer, name), part in zip(names.items(), parts, strict=True):
        if problem := _problem(part):
            raise PlanError(buffer, f"{problem}, or leave it out by exclude={[name]}")


def _problem(tensor: torch.Tensor) -> str:
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"it is a {type(tensor).__name__}, whose memory is not its values: replace it by a plain tensor"
        )
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        return f"it is on {tensor.device}: move it to a CPU or an NVIDIA GPU"
    if tensor.numel() and not (tensor.untyped_storage().nbytes() and tensor.data_ptr()):
        return "it has no memory: load its values before connect()"
    if tensor.is_neg():
        return "it is a negated view: replace it by its resolve_neg()"
    return ""
