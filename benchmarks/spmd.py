"""A control group for a peer's ranks, separate from the group that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["Control"]


class Control:
    """A gloo group of all ranks. Make it once the default process group exists."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def seconds(self, run: Callable[[], object]) -> float:
        """Start `run` on all ranks at once. Returns the seconds of the slowest rank."""
        dist.barrier(self._group)
        started = time.perf_counter()
        run()
        return self.most(time.perf_counter() - started)

    def most(self, value: float) -> float:
        """Return the largest `value` of any rank."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def total(self, value: int) -> int:
        """Return the sum of all ranks' `value`."""
        return int(self._reduced(value, dist.ReduceOp.SUM))

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        reduced = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(reduced, how, group=self._group)
        return float(reduced[0])
