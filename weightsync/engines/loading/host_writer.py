"""Copies of buckets into live host memory, and their digests, prepared once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from weightsync.channel.sink import PieceView
from weightsync.memory.kernels.copied_experts import added
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.kernels.host_table import HostPart, HostTable
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Plan, Segment
from weightsync.protocol.messages import Digests

CHUNK_NBYTES = 4 << 20
"""Bytes of a large tensor that one thread copies at a time."""
GATHERED_NBYTES = 1 << 20
"""Bytes of views with gaps that are digested together: each call for a single view takes some 0.1 ms."""
_ALIGNMENT = 16

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A view of live memory and one of a bucket, of the same shape."""
_Share = tuple[int, Box, torch.Tensor]
"""A tensor's number, a box of it, and a view of that in live memory."""


class HostTables:
    """Copies buckets and digests live memory: contiguous parts by a table, others one by one.

    Args:
        segments: the segments of each tensor of the plan, see `by_tensor`.
        live: the buffers by name.
        views: the buckets that `copy` usually gets, see `EngineFeed.views`. They must stay mapped.
        digested: the segments by the factor of their digests, see `by_factor`.
    """

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Segment]],
        live: Mapping[str, torch.Tensor],
        views: Sequence[Sequence[PieceView]],
        digested: Mapping[int, Sequence[Sequence[Segment]]],
    ) -> None:
        self._plan, self._segments, self._live = plan, segments, live
        self._are_on_device = any(tensor.is_cuda for tensor in live.values())
        # By identity, since comparing lists would compare their tensors.
        self._known = {id(pieces): (pieces, self._copies(pieces)) for pieces in views}
        self._shares = {factor: _Shares(plan, each, live) for factor, each in digested.items()}

    def copy(self, pieces: Sequence[PieceView]) -> None:
        """Write one bucket. Copies of a bucket that is not in `views` are prepared now."""
        known = self._known.get(id(pieces))
        table, pairs = known[1] if known else (None, self._pairs(pieces))
        if table:
            table.run_all()
        for held, data in pairs:
            held.copy_(data)
        if self._are_on_device:
            torch.cuda.synchronize()

    def digests(self) -> Digests:
        """Return the digests of the live memory, uint64[num_tensors]."""
        found = {factor: shares.digests() for factor, shares in self._shares.items()}
        return added(found) if len(found) > 1 else found[1]

    def _copies(self, pieces: Sequence[PieceView]) -> tuple[HostTable, list[_Pair]]:
        parts, others = [], []
        for held, data in self._pairs(pieces):
            if held.dtype != data.dtype or not (_is_packed(held) and _is_packed(data)):
                others.append((held, data))
                continue
            start, target, itemsize = data.data_ptr(), held.data_ptr(), data.element_size()
            for box, at in _chunks(Box((0,), (data.numel(),)), itemsize):
                part = HostPart(
                    tensor=-1,
                    address=start + at,
                    box=box,
                    shape=box.extent,
                    itemsize=itemsize,
                    target=target + at,
                )
                parts.append(part)
        return HostTable(parts, 0), others

    def _pairs(self, pieces: Sequence[PieceView]) -> Iterator[_Pair]:
        for tensor, box, data in pieces:
            for segment in self._segments[tensor]:
                if box == segment.box:
                    yield self._view(segment), data
                elif part := box.intersect(segment.box):
                    yield self._view(segment)[part.slices(segment.box)], data[part.slices(box)]

    def _view(self, segment: Segment) -> torch.Tensor:
        return segment_view(self._live[segment.buffer], segment)


class _Shares:
    """Digests segments of live memory, given for each tensor of the plan."""

    def __init__(
        self, plan: Plan, segments: Sequence[Sequence[Segment]], live: Mapping[str, torch.Tensor]
    ) -> None:
        parts: list[HostPart] = []
        gathered: list[_Share] = []
        others: list[_Share] = []
        for tensor, held in enumerate(segments):
            meta = plan.tensors[tensor]
            for segment in held:
                view = segment_view(live[segment.buffer], segment)
                if not _is_packed(view):
                    is_small = view.device.type == "cpu" and view.nbytes <= GATHERED_NBYTES
                    (gathered if is_small else others).append((tensor, segment.box, view))
                    continue
                start, itemsize = view.data_ptr(), view.element_size()
                parts += [
                    HostPart(tensor=tensor, address=start + at, box=box, shape=meta.shape, itemsize=itemsize)
                    for box, at in _chunks(segment.box, itemsize)
                ]
        self._table, self._gathered = HostTable(parts, len(plan.tensors)), _Gathered(plan, gathered)
        self._plan, self._others = plan, others

    def digests(self) -> Digests:
        """Return the sums over each tensor's segments, uint64[num_tensors]."""
        self._table.run_all()
        digests = self._table.digests() + self._gathered.digests()
        for tensor, box, view in self._others:
            share = tensor_digest(view, self._plan.tensors[tensor].shape, box)
            # Add to a slice: arrays wrap around, scalars would warn.
            digests[tensor : tensor + 1] += np.uint64(share)
        return digests


class _Gathered:
    """Digests small views with gaps in host memory, from copies without gaps. Groups share their memory."""

    def __init__(self, plan: Plan, shares: Sequence[_Share]) -> None:
        """A share has at most `GATHERED_NBYTES`."""
        self._memory = torch.empty(GATHERED_NBYTES if shares else 0, dtype=torch.uint8)
        self._views = [view for _, _, view in shares]
        self._copies: list[torch.Tensor] = []
        self._bounds: list[int] = []
        parts, start, end = [], self._memory.data_ptr(), GATHERED_NBYTES
        for number, (tensor, box, view) in enumerate(shares):
            if end + view.nbytes > GATHERED_NBYTES:
                self._bounds.append(number)
                end = 0
            self._copies.append(self._memory[end : end + view.nbytes].view(view.dtype).view(view.shape))
            shape, itemsize = plan.tensors[tensor].shape, view.element_size()
            parts.append(
                HostPart(tensor=tensor, address=start + end, box=box, shape=shape, itemsize=itemsize)
            )
            end += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._bounds.append(len(shares))
        self._table = HostTable(parts, len(plan.tensors))

    def digests(self) -> Digests:
        """Return the sums over the views of each tensor, uint64[num_tensors]."""
        for first, end in itertools.pairwise(self._bounds):
            torch._foreach_copy_(self._copies[first:end], self._views[first:end])
            self._table.run(first, end)
        return self._table.digests()


def _is_packed(view: torch.Tensor) -> bool:
    """Return True if a view fits a table: on the host, contiguous, with aligned elements."""
    return view.device.type == "cpu" and view.is_contiguous() and view.data_ptr() % view.element_size() == 0


def _chunks(box: Box, itemsize: int) -> Iterator[tuple[Box, int]]:
    """Yield the parts of a box, and the byte of the box at which the part starts."""
    at = 0
    for part in box.split(CHUNK_NBYTES // itemsize):
        yield part, at
        at += part.numel * itemsize
