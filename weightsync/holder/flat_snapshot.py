"""An engine rank's memory as one run of bytes, the form in which it is saved and filled."""

from __future__ import annotations

import ctypes
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from weightsync.memory import cuda
from weightsync.memory.device import MappedTensors
from weightsync.memory.kernels.digests import BoxPart, box_digests
from weightsync.plan import Box
from weightsync.protocol.messages import Digests


class FlatSnapshot:
    """An engine rank's live buffers as one run of bytes, ordered by name.

    Attributes:
        is_on_device: whether the memory is a GPU's.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        """`live`: uint8, one dimension, on one device."""
        self._live, self._names = live, sorted(live)  # `live` is kept, as addresses are used
        self._address: Callable[[str], int]
        if isinstance(live, MappedTensors):  # parts that are not copied yet are not mapped
            self.is_on_device, nbytes, self._address = True, live.nbytes, live.address
        else:
            self.is_on_device = any(each.is_cuda for each in live.values())
            nbytes = {name: len(each) for name, each in live.items()}
            self._address = {name: each.data_ptr() for name, each in live.items()}.__getitem__
        self._starts = [0, *itertools.accumulate(nbytes[name] for name in self._names)]

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def digests(self) -> Digests:
        """Return the digest of the whole run of bytes: uint64[1]."""
        starts = zip(self._names, self._starts, strict=False)
        parts = [
            BoxPart(0, (live := self._live[name]), (self.nbytes,), Box((start,), (len(live),)))
            for name, start in starts
        ]
        return box_digests(parts, 1)

    def save(self, to: torch.Tensor) -> None:
        """Copy everything to `to`, uint8[nbytes] on the host, and wait until it is there."""
        self.copy_to(to, 0)
        if self.is_on_device:
            torch.cuda.current_stream().synchronize()

    def copy_to(self, to: torch.Tensor, first: int) -> None:
        """Start copying from byte `first` on to `to`, uint8 on the host; uses the current stream."""
        copy = self._copy()
        for live, held, nbytes in self._parts(to, first):
            copy(held, live, nbytes)

    def load(self, held: torch.Tensor, first: int) -> None:
        """Start writing `held` from byte `first` on. It is uint8 on the host; uses the current stream."""
        copy = self._copy()
        for live, part, nbytes in self._parts(held, first):
            copy(live, part, nbytes)

    def _copy(self) -> Callable[[int, int, int], object]:
        if not self.is_on_device:
            return ctypes.memmove
        return partial(cuda.copy, stream=torch.cuda.current_stream())

    def _parts(self, held: torch.Tensor, first: int) -> Iterator[tuple[int, int, int]]:
        """Yield for each part of a buffer its address, the address in `held`, and the bytes."""
        # A model has tens of thousands of buffers, and a refill hundreds of steps. So a step only visits the
        # buffers that it fills.
        at, end = bisect_right(self._starts, first) - 1, first + len(held)
        for number in range(at, bisect_left(self._starts, end)):
            start, name = self._starts[number], self._names[number]
            low, high = max(first, start), min(end, self._starts[number + 1])
            if low < high:
                yield self._address(name) + low - start, held.data_ptr() + low - first, high - low
