"""Where the bytes of each bucket go in live host memory, and what is digested, worked out once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from weightsync.channel.sink import PieceView
from weightsync.memory.digests import tensor_digest
from weightsync.memory.host_table import HostPart, HostTable
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Plan, Segment
from weightsync.protocol.messages import Digests

__all__ = ["HostTables"]

CHUNK_NBYTES = 4 << 20
"""What one thread takes of a large tensor."""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""Of live memory, and of a bucket: the same shape."""


class HostTables:
    """Copies buckets and digests what they wrote: by table what is contiguous, the rest one by one.

    Args:
        segments: of each tensor of the plan, see `by_tensor`.
        live: the buffers by name.
        views: the buckets that `copy` will be given most often: see `EngineFeed.views`. They stay mapped.
    """

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Segment]],
        live: Mapping[str, torch.Tensor],
        views: Sequence[Sequence[PieceView]],
    ) -> None:
        self._plan, self._segments, self._live = plan, segments, live
        self._are_on_device = any(tensor.is_cuda for tensor in live.values())
        # By identity: a list's own comparison would look at each of its tensors.
        self._known = {id(pieces): (pieces, self._copies(pieces)) for pieces in views}
        self._digests, self._others = self._shares()

    def copy(self, pieces: Sequence[PieceView]) -> None:
        """Write one bucket. One that is in none of `views` is worked out now."""
        known = self._known.get(id(pieces))
        table, pairs = known[1] if known else (None, self._pairs(pieces))
        if table:
            table.run_all()
        for held, data in pairs:
            held.copy_(data)
        if self._are_on_device:
            torch.cuda.synchronize()

    def digests(self) -> Digests:
        """Of the live memory: uint64[num_tensors]."""
        self._digests.run_all()
        digests = self._digests.digests()
        for tensor, box, view in self._others:
            share = tensor_digest(view, self._plan.tensors[tensor].shape, box)
            # On a slice: arrays wrap, scalars warn.
            digests[tensor : tensor + 1] += np.uint64(share)
        return digests

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

    def _shares(self) -> tuple[HostTable, list[tuple[int, Box, torch.Tensor]]]:
        parts, others = [], []
        for tensor, segments in enumerate(self._segments):
            meta = self._plan.tensors[tensor]
            for segment in segments:
                view = self._view(segment)
                if not _is_packed(view):
                    others.append((tensor, segment.box, view))
                    continue
                start, itemsize = view.data_ptr(), view.element_size()
                parts += [
                    HostPart(tensor=tensor, address=start + at, box=box, shape=meta.shape, itemsize=itemsize)
                    for box, at in _chunks(segment.box, itemsize)
                ]
        return HostTable(parts, len(self._plan.tensors)), others

    def _view(self, segment: Segment) -> torch.Tensor:
        return segment_view(self._live[segment.buffer], segment)


def _is_packed(view: torch.Tensor) -> bool:
    """Whether a table may have it: on the host, contiguous, and aligned to its elements."""
    return view.device.type == "cpu" and view.is_contiguous() and view.data_ptr() % view.element_size() == 0


def _chunks(box: Box, itemsize: int) -> Iterator[tuple[Box, int]]:
    """Parts of a box, and at which of its bytes each starts."""
    at = 0
    for part in box.split(CHUNK_NBYTES // itemsize):
        yield part, at
        at += part.numel * itemsize
