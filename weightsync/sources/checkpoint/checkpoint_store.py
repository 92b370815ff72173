"""One host's share of a checkpoint's files, in memory. Files in ``/dev/shm`` are mapped, not copied."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from weightsync.errors import SourceChangedError, StateError
from weightsync.memory.host import SharedBuffer, num_threads
from weightsync.memory.kernels.digests import tensor_digest, warm_up
from weightsync.memory.kernels.nonfinite import count_nonfinite
from weightsync.plan import MAPPED, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.balance import Stretch, partition
from weightsync.plan.layout.draft import in_model
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.handles import HostExport
from weightsync.protocol.messages import Published
from weightsync.sources.checkpoint.safetensors_files import contents_of_both
from weightsync.sources.checkpoint.stored_files import StoredFile

_CHUNK_NBYTES = 4 << 20
"""Bytes that are read, and then digested while they are still in the processor's cache."""
_ALIGN = 64
_MOST_THREADS = 16
_NICE = 19
"""The lowest priority: Ray's workers, in which engines start, have 15."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that `CheckpointStore.read` read from files, bytes that it mapped, and seconds."""

    nbytes: int
    mapped_nbytes: int
    seconds: float


class CheckpointStore:
    """Share number `share` of `num_shares` of safetensors files. Files are only read.

    It serves as many trainer ranks as its host has holders, see `layout`.

    Attributes:
        tensors: all tensors of the checkpoint, under the engines' names.
        origin: the file that each tensor is in, or one of them if there are several.
    """

    def __init__(
        self,
        paths: Sequence[str],
        share: int = 0,
        num_shares: int = 1,
        exclude: Collection[str] = (),
        stored: bool = False,
        draft: Sequence[str] = (),
    ) -> None:
        """Read and check the headers of a model's files and a draft's.

        `exclude` and `stored` as in `contents_of_both`, whose errors it raises.
        """
        found = contents_of_both(paths, draft, exclude, stored)
        self.tensors, self.origin, self._tied = found.tensors, found.origin, found.tied
        self._files = found.files
        self._shapes = {meta.name: meta for meta in found.tensors}
        self._mine = partition(found.stretches, num_shares)[share]
        self._held: list[Stretch] = []
        self._num_read = self._num_chunks = 0
        self._mapped: Mapping[int, StoredFile] = {
            number: file
            for number, file in enumerate(found.files)
            if isinstance(file, StoredFile) and file.in_memory
        }
        self._memory: dict[int, SharedBuffer] = {}
        self._digests: dict[tuple[str, str], int] = {}
        self._nonfinite: Counter[tuple[str, str]] = Counter()

    def read(self) -> Reading:
        """Read the share into memory and digest it, several files and parts of files in parallel.

        Raises TransportError if the host has too little memory, and SourceChangedError if a file changed
        since its header was read.
        """
        begun, mapped = time.perf_counter(), self._mapped
        numbers = sorted({stretch.buffer for stretch in self._mine})
        warm_up()
        with ThreadPoolExecutor(num_threads(_MOST_THREADS), initializer=_give_way) as threads:
            opened = threads.map(partial(_opened, self._mine, mapped), numbers)
            self._memory = dict(zip(numbers, opened, strict=True))
            packed = _packed(self._mine, mapped)
            chunks = [
                (from_file, chunk, chunk.start - held.start)
                for from_file, held in zip(self._mine, packed, strict=True)
                for chunk in _chunks(held)
            ]
            self._num_chunks = len(chunks)
            shares = threads.map(lambda it: self._read(*it), chunks)
            self._add_up([chunk for _, chunk, _ in chunks], shares)
        self._held = packed
        nbytes = {
            each: sum(s.nbytes for s in self._mine if (s.buffer in mapped) is each) for each in (True, False)
        }
        return Reading(nbytes[False], nbytes[True], time.perf_counter() - begun)

    def read_share(self) -> float:
        """Return how much of the share is read, from 0 to 1. Threads may miss one another's counts."""
        return 1.0 if self._held else self._num_read / max(self._num_chunks, 1)

    def layout(self, rank: int, num_ranks: int) -> RankLayout:
        """Return the layout of rank `rank` of `num_ranks` on this host. May be called before `read`."""
        stretches = partition(self._held or self._mine, num_ranks)[rank]
        segments = tuple(_segment(each) for each in stretches)
        return RankLayout(self.tensors, segments, self._tied, device=MAPPED)

    def export(self, rank: int, num_ranks: int) -> HostExport:
        """Return a rank's layout and memory for its holder. Raises StateError before `read` has ended."""
        if not self._held:
            raise StateError("the checkpoint has not been read yet")
        layout = self.layout(rank, num_ranks)
        used = {segment.buffer for segment in layout.segments}
        memory = {str(file): buffer.handle for file, buffer in self._memory.items()}
        held = {file: handle for file, handle in memory.items() if file in used}
        return HostExport(LayoutTable.of(layout), held)

    def published(self, tensors: Sequence[TensorMeta]) -> Published:
        """Return digests of this host's share, cast to the dtypes of `tensors`, which are the plan's.

        Raises SourceChangedError if bytes of mapped files that are cast are no longer those that were read.
        """
        taken = {meta.name for meta in tensors}
        aliases = dict(self._tied)
        names = [aliases.get(meta.name, meta.name) for meta in tensors]
        own = [name if name in self._shapes else in_model(name, taken) for name in names]
        dtypes = {name: meta.dtype for name, meta in zip(own, tensors, strict=True)}
        chunks = [
            chunk
            for held in self._held
            if held.tensor in dtypes and (held.tensor, dtypes[held.tensor]) not in self._digests
            for chunk in _chunks(held)
        ]
        with ThreadPoolExecutor(num_threads(_MOST_THREADS)) as threads:
            shares = [*threads.map(lambda chunk: self._digest(chunk, dtypes[chunk.tensor]), chunks)]
            self._require_as_read(chunks if self._mapped else (), threads)
        self._add_up(chunks, shares, dtypes)
        found = [self._digests.get((name, dtypes[name]), 0) for name in own]
        counts = {
            meta.name: self._nonfinite[name, meta.dtype] for name, meta in zip(own, tensors, strict=True)
        }
        return Published(np.array(found, np.uint64), {name: count for name, count in counts.items() if count})

    def require_unwritten(self) -> None:
        """Raise SourceChangedError if a mapped file was written after its header was read."""
        for number in self._mapped.keys() & self._memory.keys():
            self._mapped[number].require_unwritten(self._memory[number].fileno())

    def close(self) -> None:
        """Close the memory."""
        for buffer in self._memory.values():
            buffer.close()
        self._memory, self._held = {}, []

    def _read(self, stored: Stretch, chunk: Stretch, offset: int) -> tuple[int, int]:
        """Read `chunk`, unless it is mapped, from byte `offset` of `stored` on; return its `_digest`."""
        mapped = self._mapped.get(stored.buffer)
        if mapped is None:
            self._files[stored.buffer].read_into(_bytes(self._memory, chunk), stored.start + offset)
        share = self._digest(chunk, self._shapes[chunk.tensor].dtype)
        if mapped:
            mapped.require_unchanged(self._memory[stored.buffer].fileno())
        self._num_read += 1
        return share

    def _require_as_read(self, chunks: Sequence[Stretch], threads: ThreadPoolExecutor) -> None:
        """Digest `chunks` of whole tensors as they are stored, and compare with `read`."""
        dtypes = {chunk.tensor: self._shapes[chunk.tensor].dtype for chunk in chunks}
        shares = threads.map(lambda chunk: self._digest(chunk, dtypes[chunk.tensor]), chunks)
        again: Counter[str] = Counter()
        for chunk, (share, _) in zip(chunks, shares, strict=True):
            again[chunk.tensor] += share
        names = [name for name, total in again.items() if total % 2**64 != self._digests[name, dtypes[name]]]
        if names:
            raise SourceChangedError(0, (), sorted({self.origin[name] for name in names}))

    def _digest(self, chunk: Stretch, dtype: str) -> tuple[int, int]:
        """Return the digest of a chunk in `dtype`, and its number of NaN and Inf."""
        meta = self._shapes[chunk.tensor]
        data = _bytes(self._memory, chunk)
        if data.data_ptr() % meta.itemsize:  # tensors in files need not be aligned
            data = data.clone()
        elements = data.view(getattr(torch, meta.dtype)).view(chunk.box.extent)
        sent = elements.to(getattr(torch, dtype))
        return tensor_digest(sent, meta.shape, chunk.box), count_nonfinite(sent)

    def _add_up(
        self,
        chunks: Sequence[Stretch],
        shares: Iterable[tuple[int, int]],
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        for chunk, (share, nonfinite) in zip(chunks, shares, strict=True):
            key = chunk.tensor, dtypes[chunk.tensor] if dtypes else self._shapes[chunk.tensor].dtype
            self._digests[key] = (self._digests.get(key, 0) + share) % 2**64
            self._nonfinite[key] += nonfinite


def _opened(stretches: Sequence[Stretch], mapped: Mapping[int, StoredFile], number: int) -> SharedBuffer:
    """Return memory of a file, or for the stretches of it."""
    if file := mapped.get(number):
        with file.opened() as fd:
            return SharedBuffer.of_file(fd)
    return SharedBuffer.create(sum(_aligned(each.nbytes) for each in stretches if each.buffer == number))


def _bytes(memory: Mapping[int, SharedBuffer], held: Stretch) -> torch.Tensor:
    return memory[held.buffer].tensor[held.start : held.start + held.nbytes]


def _packed(stretches: Sequence[Stretch], mapped: Collection[int]) -> list[Stretch]:
    """Place stretches in memory: as in the file if it is mapped, else one after another."""
    ends: dict[int, int] = {}
    held = []
    for stretch in stretches:
        start = stretch.start if stretch.buffer in mapped else ends.get(stretch.buffer, 0)
        ends[stretch.buffer] = start + _aligned(stretch.nbytes)
        held.append(replace(stretch, start=start))
    return held


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _chunks(held: Stretch) -> Iterator[Stretch]:
    start = held.start
    for box in held.box.split(_CHUNK_NBYTES // held.itemsize):
        yield replace(held, box=box, start=start)
        start += box.numel * held.itemsize


def _segment(stretch: Stretch) -> Segment:
    strides = stretch.box.strides(stretch.itemsize)
    return Segment(stretch.tensor, stretch.box, str(stretch.buffer), stretch.start, strides)


def _give_way() -> None:
    """Lower the priority of this thread, since engines start at the same time."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
