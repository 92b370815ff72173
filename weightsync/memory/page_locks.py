"""Page-locks on host memory of other owners."""

from __future__ import annotations

import logging
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterable

import torch

from weightsync.errors import TransportError
from weightsync.memory import cuda
from weightsync.memory.tensors import extent_nbytes

logger = logging.getLogger("weightsync.memory")

_MIN_NBYTES = 1 << 20
"""Fewer bytes are not worth a lock: they share pages with other tensors, and are copied in no time."""


class PageLocks:
    """Locks the pages of tensors, so that a GPU copies at the rate of the link.

    Keeps the tensors' memory allocated, since a GPU would continue to read an address's old pages.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lock `tensors` on the host, without large gaps. Small tensors are left out."""
        self._held = [each for each in tensors if each.numel()]
        pinned = [_span(each) for each in self._held if each.is_pinned()]
        self._own: list[tuple[int, int]] = []
        for first, end in _joined(_pages(_span(each)) for each in self._held if not each.is_pinned()):
            if end - first < _MIN_NBYTES:
                continue
            try:
                cuda.lock_pages(first, end - first)
            except TransportError as error:
                logger.warning("weights are copied before they are sent: %s", error)
            else:
                self._own.append((first, end))
        self._spans = sorted({*pinned, *self._own})

    def cover(self, tensor: torch.Tensor) -> bool:
        """Return True if all of a contiguous tensor is locked."""
        start = tensor.data_ptr()
        at = bisect_right(self._spans, (start, sys.maxsize)) - 1
        return at >= 0 and start + tensor.nbytes <= self._spans[at][1]

    def close(self) -> None:
        """Unlock. No copy may be running. Safe to call twice."""
        for first, _ in self._own:
            cuda.unlock_pages(first)
        self._own, self._spans, self._held = [], [], []


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + extent_nbytes(tensor)


def _pages(span: tuple[int, int]) -> tuple[int, int]:
    first, end = span
    return first // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that overlap: no page can be locked twice."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(set(spans)):
        if joined and first < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined
