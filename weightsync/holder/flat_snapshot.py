"""An engine rank's live parameters as one run of bytes, to be kept and to be written back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

__all__ = ["EngineImage"]


class EngineImage:
    """The buffers in the order of their names, one right behind the other."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        """`live`: uint8, one dimension, on one device."""
        self._live = [live[name] for name in sorted(live)]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._live))

    def save(self, to: torch.Tensor) -> None:
        """Copy all of it to `to`, uint8[nbytes] on the host; it is there when this returns."""
        for live, held in self._pairs(to, 0):
            held.copy_(live, non_blocking=True)
        if any(live.is_cuda for live in self._live):
            torch.cuda.current_stream().synchronize()

    def load(self, held: torch.Tensor, first: int) -> None:
        """Begin to write `held`, uint8 on the host, over the bytes from `first` on, on the current stream."""
        for live, part in self._pairs(held, first):
            live.copy_(part, non_blocking=True)

    def _pairs(self, held: torch.Tensor, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start, end = 0, first + len(held)
        for live in self._live:
            low, high = max(first, start), min(end, start + len(live))
            if low < high:
                yield live[low - start : high - start], held[low - first : high - first]
            start += len(live)
