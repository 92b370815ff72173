"""Weights of any `nn.Module`: plain tensors, or DTensors of FSDP2 and tensor parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from weightsync.errors import ConfigError
from weightsync.memory.addresses import AddressGuard, attached_part, is_sharded
from weightsync.memory.tensors import byte_strides, meta_of, named_tensors
from weightsync.plan import Box, RankLayout, Segment
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.mesh import mesh_place
from weightsync.sources.readable import require_no_flat_parameters, require_strided
from weightsync.sources.tensors import Guard, TensorSource
from weightsync.sources.zero_partitions import is_partitioned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class ModuleSource(TensorSource):
    """Reads a module's parameters and persistent buffers, under their names in its ``state_dict``."""

    def _weights(self) -> LocalWeights:
        require_no_flat_parameters(self.model)
        tensors, tied = named_tensors(self.model)
        require_strided(tensors)
        for name, tensor in tensors.items():
            if is_partitioned(tensor):
                remedy = (
                    f"{name} is partitioned by ZeRO-3: give the engine that deepspeed.initialize returned"
                )
                raise ConfigError("self.model", type(self.model).__name__, remedy)
        metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
        cut = functools.cache(_cut)  # a mixture of experts has few shapes, and thousands of tensors
        segments = tuple(segment_of(name, tensor, cut) for name, tensor in tensors.items())
        return LocalWeights(RankLayout(metas, segments, tied, mesh=mesh_place(tensors)), tensors)

    def _watch(self, weights: LocalWeights) -> Guard:
        return AddressGuard(self.model, weights.tensors)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return named_tensors(self.model)[0]


def _cut(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    """Return this rank's box of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(extent))


def segment_of(name: str, tensor: torch.Tensor, cut: Callable[..., Box] = _cut) -> Segment:
    """Return which box of a tensor this rank has. Raises ConfigError if it has a part of a sum."""
    strides = byte_strides(attached_part(tensor))
    if not is_sharded(tensor):
        return Segment(name, Box.whole(tuple(tensor.shape)), name, 0, strides)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(name, str(tensor.placements), "reduce partial values before weights are published")
    box = cut(tensor.shape, tensor.device_mesh, tensor.placements)
    return Segment(name, box, name, 0, strides)
