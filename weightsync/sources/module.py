"""Weights of any `nn.Module`: plain tensors, or DTensors as FSDP2 and tensor parallelism leave them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weightsync.errors import ConfigError, nearest
from weightsync.memory import BufferHandle, SharedBuffer
from weightsync.modules import named_tensors
from weightsync.plan import Box, Piece, Plan, RankLayout, Segment, TensorMeta
from weightsync.verify import Digests, tensor_digest, warm_up

__all__ = ["ModuleSource"]


@dataclass(frozen=True, slots=True)
class _Copy:
    """One piece of the plan, and where in this rank's memory it comes from."""

    source: str
    index: tuple[slice, ...]
    piece: Piece


class ModuleSource:
    """Reads the placements of a module's parameters and persistent buffers.

    A module that is not sharded but runs on several ranks is declared whole by each of them; the
    plan chooses who sends what. `exclude` names tensors that no engine wants, as a value head.
    """

    def __init__(self, model: nn.Module, exclude: Collection[str] = ()) -> None:
        self._model = model
        self._exclude = frozenset(exclude)
        self._arena: SharedBuffer | None = None
        self._plan: Plan | None = None
        self._copies: tuple[_Copy, ...] = ()

    def layout(self) -> RankLayout:
        """Global shapes, this rank's boxes, and which names are tied."""
        tensors, tied = named_tensors(self._model)
        for name in self._exclude - set(tensors):
            raise ConfigError("exclude", name, nearest(name, tensors))
        kept = {name: tensor for name, tensor in tensors.items() if name not in self._exclude}
        metas = tuple(TensorMeta(name, _dtype_name(t.dtype), tuple(t.shape)) for name, t in kept.items())
        segments = tuple(_segment(name, tensor) for name, tensor in kept.items())
        return RankLayout(metas, segments, tuple(pair for pair in tied if pair[1] in kept))

    def attach(self, plan: Plan, trainer: int, arena: BufferHandle) -> str:
        """Work out every copy once."""
        self.close()
        self._arena, self._plan = SharedBuffer.open(arena), plan
        boxes = {segment.tensor: segment for segment in self.layout().segments}
        canonical = dict(named_tensors(self._model)[1])
        copies = []
        for piece in plan.trainer_pieces(trainer):
            name = plan.tensors[piece.tensor].name
            source = name if name in boxes else canonical[name]
            copies.append(_Copy(source, piece.box.slices(boxes[source].box), piece))
        self._copies = tuple(copies)
        warm_up()
        return plan.digest()

    @torch.no_grad()
    def publish(self) -> Digests:
        """Copy and digest, piece by piece, casting where the engine's dtype is another float."""
        assert self._arena is not None
        assert self._plan is not None
        metas = self._plan.tensors
        shares = np.zeros(len(metas), dtype=np.uint64)
        live = {name: _local(tensor) for name, tensor in named_tensors(self._model)[0].items()}
        for copy in self._copies:
            piece = copy.piece
            meta = metas[piece.tensor]
            dtype: torch.dtype = getattr(torch, meta.dtype)
            cut = live[copy.source][copy.index].to(dtype)
            held = self._arena.tensor[piece.arena_offset : piece.arena_offset + piece.nbytes]
            held.view(dtype).view(piece.box.extent).copy_(cut)
            share = np.uint64(tensor_digest(cut, meta.shape, piece.box))
            shares[piece.tensor : piece.tensor + 1] += share  # on a slice: arrays wrap, scalars warn
        return shares

    def close(self) -> None:
        """Drop the arena."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _segment(name: str, tensor: torch.Tensor) -> Segment:
    local = _local(tensor)
    offset, extent = (0,) * local.dim(), tuple(local.shape)
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(
                name, str(tensor.placements), "reduce partial values before weights are published"
            )
        extent, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    strides = tuple(stride * local.element_size() for stride in local.stride())
    return Segment(name, Box(tuple(offset), tuple(extent)), name, 0, strides)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
