"""Weights of any `nn.Module`: plain tensors, or DTensors of FSDP2 and tensor parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from weightsync.errors import ConfigError
from weightsync.memory.addresses import AddressGuard, attached_part, is_sharded
from weightsync.memory.tensors import byte_strides, meta_of, named_tensors
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.segment import Cut, MeshPlace
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.readable import require_no_flat_parameters, require_strided
from weightsync.sources.tensors import Guard, TensorSource
from weightsync.sources.zero_partitions import PART, check_partition, part_segments, whole_meta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class ModuleSource(TensorSource):
    """Reads a module's parameters and persistent buffers, under their names in its ``state_dict``."""

    def _weights(self) -> LocalWeights:
        require_no_flat_parameters(self.model)
        tensors, tied = named_tensors(self.model)
        if cut := next((name for name, tensor in tensors.items() if hasattr(tensor, PART)), None):
            remedy = f"{cut} is partitioned by ZeRO-3: give the engine that deepspeed.initialize returned"
            raise ConfigError("self.model", type(self.model).__name__, remedy)
        return weights_of(tensors, tied)

    def _watch(self, weights: LocalWeights) -> Guard:
        return AddressGuard(self.model, weights.tensors)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return named_tensors(self._module)[0]


def weights_of(tensors: Mapping[str, torch.Tensor], tied: tuple[tuple[str, str], ...]) -> LocalWeights:
    """Describe a module's tensors, whether plain, DTensors or partitioned by ZeRO-3.

    Raises PlanError or ConfigError if this rank's part of a tensor cannot be read.
    """
    require_strided(tensors)
    cut = functools.cache(_cut)  # a mixture of experts has few shapes, and thousands of tensors
    metas: list[TensorMeta] = []
    segments: list[Segment] = []
    for name, tensor in tensors.items():
        meta, held = declare(name, tensor, cut)
        metas.append(meta)
        segments += held
    layout = RankLayout(tuple(metas), tuple(segments), tied, mesh=mesh_place(tensors))
    return LocalWeights(layout, {name: getattr(tensor, PART, tensor) for name, tensor in tensors.items()})


def declare(
    name: str, tensor: torch.Tensor, cut: Callable[..., Box] | None = None
) -> tuple[TensorMeta, tuple[Segment, ...]]:
    """Return a tensor's global shape, and this rank's boxes of the tensor in a buffer of its name.

    Raises ConfigError if a DTensor is a part of a sum, or if a partition of ZeRO-3 cannot be read.
    """
    if hasattr(tensor, PART):
        check_partition(name, tensor)
        meta = whole_meta(name, tensor)
        return meta, part_segments(meta, tensor)
    segment = _segment(name, tensor, cut or _cut)
    return meta_of(name, tensor), (segment,)


def _cut(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box:
    """Return this rank's box of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(extent))


def _segment(name: str, tensor: torch.Tensor, cut: Callable[..., Box]) -> Segment:
    part = attached_part(tensor)
    strides = byte_strides(part)
    if part is tensor or not is_sharded(tensor):
        return Segment(name, Box.whole(tuple(tensor.shape)), name, 0, strides)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(name, str(tensor.placements), "reduce partial values before weights are published")
    box = cut(tensor.shape, tensor.device_mesh, tensor.placements)
    return Segment(name, box, name, 0, strides)


def mesh_place(tensors: Mapping[str, torch.Tensor]) -> MeshPlace | None:
    """Return the place of this rank, or None if no tensor is a DTensor.

    Whether boxes follow from it is found out where the layout is put into columns.
    """
    axes: dict[DeviceMesh, int] = {}
    first: dict[int, int] = {}  # by the mesh's id: tens of thousands of tensors would hash what it holds
    sizes: list[int] = []
    coordinates: list[int] = []
    cuts: dict[str, Cut] = {}
    cut_by = functools.cache(_cut_by)
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            cuts[name] = ()
            continue
        mesh = tensor.device_mesh
        if id(mesh) not in first:
            place = mesh.get_coordinate()
            if place is None:  # this rank is not in the mesh
                return None
            if mesh not in axes:
                axes[mesh] = len(sizes)
                sizes += mesh.shape
                coordinates += place
            first[id(mesh)] = axes[mesh]
        cuts[name] = cut_by(first[id(mesh)], tensor.placements)
    return MeshPlace(tuple(sizes), tuple(coordinates), cuts) if sizes else None


def _cut_by(first: int, placements: tuple[Placement, ...]) -> Cut:
    """Return the dimensions that cut a tensor, in the order of the cuts. `first` is its mesh's first one.

    FSDP cuts what tensor parallelism, a later dimension of the mesh, has cut before: its placement has a
    `split_factor`.
    """
    shards = [
        (hasattr(each, "split_factor"), axis, getattr(each, "dim", -1))
        for axis, each in enumerate(placements, first)
        if hasattr(each, "dim")
    ]
    return tuple((axis, dim) for _, axis, dim in sorted(shards))
