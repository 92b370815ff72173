"""A rank's place in the meshes of its model's DTensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weightsync.memory.addresses import is_sharded
from weightsync.plan.layout.segment import Cut, MeshPlace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def mesh_place(tensors: Mapping[str, torch.Tensor]) -> MeshPlace | None:
    """Return the place of this rank, or None if no tensor is a DTensor.

    Whether boxes follow from it is found out where the layout is put into columns.
    """
    axes: dict[DeviceMesh, int] = {}
    first: dict[int, int] = {}  # by the mesh's id: tens of thousands of tensors would hash what it holds
    sizes: list[int] = []
    coordinates: list[int] = []
    cuts: dict[str, Cut] = {}
    cut_by = functools.cache(_cut)
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


def _cut(first: int, placements: tuple[Placement, ...]) -> Cut:
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
