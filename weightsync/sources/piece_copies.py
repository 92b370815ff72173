"""Copies of a rank's pieces to host memory, with digests of the originals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.memory.host import num_threads
from weightsync.memory.kernels.digests import host_bytes, tensor_digest
from weightsync.memory.kernels.host_table import HostPart, HostTable
from weightsync.memory.kernels.nonfinite import MASKS, count_nonfinite
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Piece, Plan, Segment
from weightsync.protocol.messages import Digests, Published, combine
from weightsync.sources.in_place import InPlace

CHUNK_NBYTES = 4 << 20
"""Bytes that are copied, and then digested while they are still in the processor's cache."""


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """A part of a piece, in this rank's memory and in the order of the send buffer."""

    tensor: int
    box: Box
    segment: Segment
    start: int


class PieceCopies:
    """One epoch's pieces, and places in host memory that is laid out as a send buffer.

    Attributes:
        copies: all parts.
        has_device_copies: whether some of the pieces are on a GPU.
    """

    def __init__(
        self,
        plan: Plan,
        pieces: Sequence[tuple[Piece, Segment]],
        live: Mapping[str, torch.Tensor],
        strays: Collection[str],
        memory: torch.Tensor,
    ) -> None:
        """Prepare the copies: together for each GPU, in a table for host memory without a cast.

        Args:
            live: the tensors now, by buffer.
            strays: buffers whose tensors must be looked up each time.
            memory: where to copy: uint8[nbytes of the send buffer], on the host.
        """
        self._plan, self._memory = plan, memory
        metas, start = plan.tensors, memory.data_ptr()
        parts, by_table, others = [], [], []
        on_gpus: defaultdict[torch.device, list[tuple[Piece, PieceCopy, torch.Tensor]]] = defaultdict(list)
        for piece, segment in pieces:
            meta, source = metas[piece.tensor], segment_view(live[segment.buffer], segment)
            dtype: torch.dtype = getattr(torch, meta.dtype)
            for copy in _chunks(plan, piece, segment, whole=source.is_cuda):
                cut = source[copy.box.slices(segment.box)]
                is_stray = segment.buffer in strays
                if cut.is_cuda and not is_stray:
                    on_gpus[cut.device].append((piece, copy, cut))
                    continue
                if is_stray or not is_ready(cut, dtype):
                    others.append(copy)
                    continue
                part = HostPart(
                    tensor=piece.tensor,
                    address=cut.data_ptr(),
                    box=copy.box,
                    shape=meta.shape,
                    itemsize=cut.element_size(),
                    target=start + copy.start,
                    mask=MASKS.get(meta.dtype, 0),
                )
                by_table.append(copy)
                parts.append(part)
        self._table = HostTable(parts, len(metas))
        self._again = self._table.without_copies()
        self._by_table, self._others, self._num_threads = by_table, others, num_threads(16)
        self._device_copies = tuple(
            _DeviceCopies(
                plan, [(piece, cut, self.place(copy).view(cut.shape)) for piece, copy, cut in its], gpu
            )
            for gpu, its in on_gpus.items()
        )
        self.has_device_copies = bool(on_gpus)
        self.copies = (*by_table, *others, *(copy for its in on_gpus.values() for _, copy, _ in its))

    def place(self, copy: PieceCopy) -> torch.Tensor:
        """Return a part's place in the copy, 1-D, in the dtype that travels."""
        meta = self._plan.tensors[copy.tensor]
        data = self._memory[copy.start : copy.start + copy.box.numel * meta.itemsize]
        dtype: torch.dtype = getattr(torch, meta.dtype)
        return data.view(dtype)

    def run(self, find: Callable[[], Mapping[str, torch.Tensor]], count: bool) -> Published:
        """Copy and digest all parts.

        Args:
            find: returns the tensors now, by buffer. Called if some are strays, or need a cast.
            count: count NaN and Inf, too.
        """
        live = self._find(find)
        counted: list[tuple[str, int]] = []

        def publish(copy: PieceCopy) -> int:
            cut, target = self._cut(copy, live), self.place(copy)
            _copy(cut, target)
            if count:
                counted.append((self._name(copy), count_nonfinite(target)))
            # Digest the weights, not the copy, so that a wrong copy is found.
            return self._share(copy, cut)

        digests = self._digest(self._table, publish, count)
        sent = [copies.run(count) for copies in self._device_copies]
        nonfinite: Counter[str] = Counter()
        for name, found in counted:
            nonfinite[name] += found
        if count:
            for number in np.flatnonzero(self._table.counts).tolist():
                nonfinite[self._name(self._by_table[number])] += int(self._table.counts[number])
        for each in sent:
            nonfinite.update(each.nonfinite)
        return Published(combine([digests, *(each.digests for each in sent)]), dict(+nonfinite))

    def digest_again(self, find: Callable[[], Mapping[str, torch.Tensor]]) -> Digests:
        """Digest all pieces in the rank's memory, as they are now. `find` as in `run`."""
        live = self._find(find)
        digests = self._digest(self._again, lambda copy: self._share(copy, self._cut(copy, live)), False)
        return combine([digests, *(copies.digest_again() for copies in self._device_copies)])

    def _find(self, find: Callable[[], Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        live = find() if self._others else {}
        for device in {tensor.device for tensor in live.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # the trainer may still write weights on another stream
        return live

    @torch.no_grad()
    def _cut(self, copy: PieceCopy, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a part as it is now, in the dtype that travels."""
        dtype: torch.dtype = getattr(torch, self._plan.tensors[copy.tensor].dtype)
        held = segment_view(live[copy.segment.buffer], copy.segment)
        return held[copy.box.slices(copy.segment.box)].to(dtype)

    def _share(self, copy: PieceCopy, cut: torch.Tensor) -> int:
        return tensor_digest(cut, self._plan.tensors[copy.tensor].shape, copy.box)

    def _digest(self, table: HostTable, share: Callable[[PieceCopy], int], count: bool) -> Digests:
        """Run all of `table`, and add the shares of other parts on the host."""
        with ThreadPoolExecutor(self._num_threads) as threads:
            shares = threads.map(share, self._others)
            list(
                threads.map(lambda each: table.run(each[0], each[1], count), table.ranges)
            )  # raises an error
            digests = table.digests()
            for copy, found in zip(self._others, shares, strict=True):
                # Add to a slice: arrays wrap around, scalars would warn.
                digests[copy.tensor : copy.tensor + 1] += np.uint64(found)
        return digests

    def _name(self, copy: PieceCopy) -> str:
        return self._plan.tensors[copy.tensor].name


class _DeviceCopies:
    """The pieces on one GPU. They are digested there, and copied to the send buffer."""

    def __init__(
        self, plan: Plan, copies: Sequence[tuple[Piece, torch.Tensor, torch.Tensor]], device: torch.device
    ) -> None:
        """`copies`: each piece, its memory on `device`, and its place in the send buffer."""
        self._copies, self._device = [(held, place) for _, held, place in copies], device
        self._digests = InPlace(plan, [(piece.tensor, piece.box, held) for piece, held, _ in copies], device)

    def run(self, count: bool) -> Published:
        """Wait until the weights are written, then digest and copy them, with a cast where dtypes differ.

        The digests are of the weights, not of the copies, so that a wrong copy is found.
        """
        self._digests.begin()
        with torch.cuda.device(self._device), torch.no_grad():
            for held, place in self._copies:
                place.copy_(held, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return self._digests.result(count)

    def digest_again(self) -> Digests:
        """Digest the weights as they are now."""
        return self._digests.digest_again()


def _chunks(plan: Plan, piece: Piece, segment: Segment, *, whole: bool) -> Iterator[PieceCopy]:
    """Yield the copies of a piece in the send buffer's order; one copy if `whole`."""
    itemsize = plan.tensors[piece.tensor].itemsize
    start = piece.send_buffer_offset
    for box in piece.box.split(piece.box.numel if whole else CHUNK_NBYTES // itemsize):
        yield PieceCopy(piece.tensor, box, segment, start)
        start += box.numel * itemsize


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` to contiguous, 1-D `target` of the same dtype."""
    if source.is_contiguous() and source.device.type == "cpu":
        # NumPy copies on this thread alone; torch would split the copy over its own threads.
        np.copyto(target.view(torch.uint8).numpy(), host_bytes(source))
    else:
        target.view(source.shape).copy_(source)


def is_ready(cut: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if a tensor can be copied as it is: on the host, contiguous, aligned, in `dtype`."""
    if cut.device.type != "cpu" or cut.dtype != dtype or not cut.is_contiguous():
        return False
    return cut.data_ptr() % cut.element_size() == 0
