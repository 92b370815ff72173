"""Weights of any `nn.Module`: plain tensors, or DTensors as FSDP2 and tensor parallelism leave them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weightsync.buffers import Attached, Export
from weightsync.device_memory import DeviceHandle, export_tensor
from weightsync.errors import ConfigError, StateError, TransportError, nearest
from weightsync.memory import BufferHandle, SharedBuffer, num_threads
from weightsync.modules import device_id, named_tensors
from weightsync.nonfinite import NonfiniteTable
from weightsync.places import local_tensor, local_tensors
from weightsync.plan import Box, Piece, Plan, RankLayout, Segment, TensorMeta
from weightsync.published import Published
from weightsync.sources.in_place import InPlace
from weightsync.sources.offloaded import Offloaded, Stored
from weightsync.verify import host_bytes, tensor_digest, warm_up

__all__ = ["ModuleSource"]


logger = logging.getLogger("weightsync.sources")


_CHUNK_NBYTES = 4 << 20
"""What is copied and then digested while a processor's cache still has it."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A part of one of the plan's pieces: where in this rank's memory, and where in the arena it starts."""

    tensor: int
    box: Box
    source: str
    index: tuple[slice, ...]
    start: int


class ModuleSource:
    """Reads the placements of a module's parameters and persistent buffers.

    A module that is not sharded but runs on several ranks is declared whole by each of them; the
    plan chooses who sends what. `exclude` names tensors that no engine wants, as a value head.
    Weights that all lie on one GPU are read in place where they can be shared, see `Source`; not those of
    one that `offloads`, for what its holder has mapped could not be given back.

    Attributes:
        model: whose parameters and buffers they are.
    """

    def __init__(self, model: nn.Module, exclude: Collection[str] = (), *, offloads: bool = False) -> None:
        self.model = model
        self._exclude = frozenset(exclude)
        self._offloads = offloads
        self._offloaded: Offloaded | None = None
        self._in_arena: Published | None = None
        self._layout: RankLayout | None = None
        self._exported: dict[str, DeviceHandle] = {}
        self._arena: SharedBuffer | None = None
        self._in_place: InPlace | None = None
        self._plan: Plan | None = None
        self._copies: tuple[_Copy, ...] = ()
        self._nonfinite = NonfiniteTable(())

    def layout(self) -> RankLayout:
        """Global shapes, this rank's boxes, and which names are tied."""
        tensors, tied = named_tensors(self.model)
        for name in self._exclude - set(tensors):
            raise ConfigError("exclude", name, nearest(name, tensors))
        kept = {name: tensor for name, tensor in tensors.items() if name not in self._exclude}
        metas = tuple(TensorMeta(name, _dtype_name(t.dtype), tuple(t.shape)) for name, t in kept.items())
        segments = tuple(_segment(name, tensor) for name, tensor in kept.items())
        ties = tuple(pair for pair in tied if pair[1] in kept)
        device = ""
        if not self._offloads:
            device, self._exported = _share({name: local_tensor(tensor) for name, tensor in kept.items()})
        self._layout = RankLayout(metas, segments, ties, device=device)
        return self._layout

    def attach(self, plan: Plan, trainer: int, arena: BufferHandle | None) -> Attached:
        """Work out every copy once."""
        self.close()
        layout = self._layout or self.layout()
        boxes = {segment.tensor: segment.box for segment in layout.segments}
        canonical = dict(layout.tied)
        sources = []
        for piece in plan.trainer_pieces(trainer):
            name = plan.tensors[piece.tensor].name
            sources.append((piece, name if name in boxes else canonical[name]))
        self._plan = plan
        if arena is None:
            self._in_place = InPlace(plan, sources, self.model, layout)
            return Attached(plan.digest(), Export(layout, self._exported))
        warm_up()
        live = self._live()
        self._copies = tuple(
            copy
            for piece, name in sources
            for copy in _chunks(plan, piece, name, boxes[name], whole=live[name].is_cuda)
        )
        metas = plan.tensors
        self._nonfinite = NonfiniteTable(
            (metas[copy.tensor].dtype, copy.start, copy.box.numel * metas[copy.tensor].itemsize)
            for copy in self._copies
        )
        self._arena = SharedBuffer.open(arena)
        if self._offloads:
            self._arena.pin()
        return Attached(plan.digest(), None)

    def publish(self, count: bool) -> Published:
        """Copy and digest, part by part, casting where the engine's dtype is another float.

        Without effect where `offload` has just done it.
        """
        assert self._plan is not None
        if self._in_place:
            return self._in_place.publish(count)
        return self._in_arena if self._in_arena is not None else self._to_arena(count)

    def offload(self) -> None:
        """Give the memory of all parameters and persistent buffers back; what they hold goes to the arena.

        What that has in another dtype, or not at all, is kept on the host besides. Raises StateError where
        the holder may have mapped the memory.
        """
        if not self._offloads:
            raise StateError("the holder may read this memory in place: give TrainerShard offloads=True")
        if self._offloaded is None:
            stored: dict[str, list[Stored]] = {}
            published = self._to_arena(count=True) if self._arena else None
            if self._arena:
                for copy in self._copies:
                    stored.setdefault(copy.source, []).append(Stored(copy.index, self._in(self._arena, copy)))
            self._offloaded = Offloaded(self._live(), stored)
            self._in_arena = published

    def onload(self) -> None:
        """Undo `offload`: the same values, in new memory."""
        if self._offloaded:
            self._offloaded.undo()
            self._offloaded = self._in_arena = None

    def _in(self, arena: SharedBuffer, copy: _Copy) -> torch.Tensor:
        """Where the arena has it: one dimension, in the dtype in which it travels."""
        assert self._plan is not None
        meta = self._plan.tensors[copy.tensor]
        data = arena.tensor[copy.start : copy.start + copy.box.numel * meta.itemsize]
        dtype: torch.dtype = getattr(torch, meta.dtype)
        return data.view(dtype)

    def _to_arena(self, count: bool) -> Published:
        assert self._plan is not None
        assert self._arena is not None
        metas, arena, live = self._plan.tensors, self._arena, self._live()
        for device in {tensor.device for tensor in live.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # weights may be on their way on a stream of the trainer's own

        counts = np.zeros(len(self._copies), np.int64)

        def publish(number: int, copy: _Copy) -> int:
            target = self._in(arena, copy)
            with torch.no_grad():
                cut = live[copy.source][copy.index].to(target.dtype)
                _copy(cut, target)
            if count:
                self._nonfinite.count(arena.tensor, counts, number, number + 1)
            # Of the weights, not of the copy: it has to show a copy that went wrong.
            return tensor_digest(cut, metas[copy.tensor].shape, copy.box)

        shares = np.zeros(len(metas), dtype=np.uint64)
        with ThreadPoolExecutor(num_threads(16)) as threads:
            for copy, share in zip(
                self._copies, threads.map(publish, range(len(self._copies)), self._copies), strict=True
            ):
                # On a slice: arrays wrap, scalars warn.
                shares[copy.tensor : copy.tensor + 1] += np.uint64(share)
        nonfinite: Counter[str] = Counter()
        for number in np.flatnonzero(counts).tolist():
            nonfinite[metas[self._copies[number].tensor].name] += int(counts[number])
        return Published(shares, dict(nonfinite))

    def close(self) -> None:
        """Let go of the holder."""
        self._in_place = None
        if self._offloaded and self._in_arena is not None:
            self._offloaded.leave_arena()
            self._in_arena = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _live(self) -> dict[str, torch.Tensor]:
        if self._offloaded:
            return self._offloaded.on_host()
        return local_tensors(self.model)


def _chunks(plan: Plan, piece: Piece, source: str, held: Box, *, whole: bool) -> Iterator[_Copy]:
    """The copies of one piece, in the order of its bytes in the arena; one copy if it is taken `whole`."""
    itemsize = plan.tensors[piece.tensor].itemsize
    start = piece.arena_offset
    for box in piece.box.split(piece.box.numel if whole else _CHUNK_NBYTES // itemsize):
        yield _Copy(piece.tensor, box, source, box.slices(held), start)
        start += box.numel * itemsize


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Into contiguous `target` of one dimension and the same dtype."""
    if source.is_contiguous() and source.device.type == "cpu":
        # By this thread alone: torch would split it between its own.
        np.copyto(target.view(torch.uint8).numpy(), host_bytes(source))
    else:
        target.view(source.shape).copy_(source)


def _share(tensors: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, DeviceHandle]]:
    """The one device that all `tensors` lie on, and their handles; nothing where it has to be an arena."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return "", {}
    try:
        handles = {name: export_tensor(tensor) for name, tensor in tensors.items() if tensor.numel()}
    except TransportError as error:
        logger.warning("weights are copied through the host: %s", error)
        return "", {}
    return device_id(next(iter(devices))), handles


def _segment(name: str, tensor: torch.Tensor) -> Segment:
    local = local_tensor(tensor)
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
