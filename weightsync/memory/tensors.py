"""The tensors of a module's checkpoint, by the names of trainers and engines."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from weightsync.plan import Box, Segment, TensorMeta


def named_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], tuple[tuple[str, str], ...]]:
    """Return parameters and persistent buffers in the order of ``state_dict``, tied tensors once.

    Returns:
        The live tensors by name, DTensors unchanged, and (alias, canonical) pairs. The first of several
        names for one tensor is canonical.
    """
    tensors: dict[str, torch.Tensor] = {}
    tied: list[tuple[str, str]] = []
    first: dict[int, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's extra state
        canonical = first.setdefault(id(value), name)
        if canonical == name:
            tensors[name] = value
        else:
            tied.append((name, canonical))
    return tensors, tuple(tied)


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Return a tensor's dtype and shape under `name`."""
    return TensorMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def metas_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorMeta, ...]:
    """Return the dtypes and shapes of tensors by name."""
    return tuple(
        TensorMeta(name, str(each.dtype).removeprefix("torch."), tuple(each.shape))
        for name, each in tensors.items()
    )


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes from one element to the next, per dimension."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride())


def extent_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last, gaps included."""
    if tensor.is_contiguous():  # most of tens of thousands of tensors are, and empty tensors, too
        return tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def device_id(device: torch.device) -> str:
    """Return ``cuda:<UUID>``, or empty for the host. An index may differ between processes.

    A MIG instance is ``cuda:MIG-<UUID>``, as in ``CUDA_VISIBLE_DEVICES``, which must name the instance: the
    properties of a device do not show whether the device is an instance.
    """
    if device.type == "cpu":
        return ""
    uuid = torch.cuda.get_device_properties(device).uuid  # starts CUDA
    return f"{device.type}:{_mig_instance(device.index) or uuid}"


def _mig_instance(index: int | None) -> str:
    """Return the name of MIG instance `index`; empty if ``CUDA_VISIBLE_DEVICES`` has no such name."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not names[0].startswith("MIG-"):
        return ""
    return names[torch.cuda.current_device() if index is None else index].strip()


def typed(data: torch.Tensor, meta: TensorMeta, box: Box) -> torch.Tensor:
    """View bytes, uint8 of one dimension, as a box of a tensor: shape ``box.extent``."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return data.view(dtype).view(box.extent)


def segment_view(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    """View `segment` in `buffer`, which has the segment's dtype: shape ``segment.box.extent``."""
    itemsize = buffer.element_size()
    strides = tuple(stride // itemsize for stride in segment.strides)
    offset = buffer.storage_offset() + segment.byte_offset // itemsize
    return torch.as_strided(buffer.detach(), segment.box.extent, strides, offset)
