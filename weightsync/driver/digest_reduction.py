"""Adds up the digests of an engine's ranks to digests of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.plan import Plan, RankLayout
from weightsync.plan.plan import by_tensor
from weightsync.protocol.messages import Digests


class DigestReduction:
    """Adds up digests so that each replica is checked.

    Ranks with the same boxes of a tensor are replicas. Each row of the result uses one replica of every part.
    """

    def __init__(self, plan: Plan, layouts: Sequence[RankLayout]) -> None:
        """Find the replicas of every tensor. `layouts` are the engine's, by rank."""
        num_ranks = len(layouts)
        self._chosen: npt.NDArray[np.bool_] = np.zeros((num_ranks, num_ranks, len(plan.tensors)), np.bool_)
        held = [by_tensor(plan, layout) for layout in layouts]
        for tensor in range(len(plan.tensors)):
            replicas: dict[frozenset[object], list[int]] = {}
            for rank in range(num_ranks):
                if held[rank][tensor]:
                    boxes = frozenset(segment.box for segment in held[rank][tensor])
                    replicas.setdefault(boxes, []).append(rank)
            for ranks in replicas.values():
                for turn in range(num_ranks):
                    self._chosen[turn, ranks[turn % len(ranks)], tensor] = True

    def __call__(self, shares: Sequence[Digests]) -> npt.NDArray[np.uint64]:
        """Return digests of whole tensors, uint64[num_ranks, num_tensors]; every share is in some row."""
        held = np.stack(shares)
        # Row by row: all rows at once would take num_ranks times the memory.
        rows = [np.where(chosen, held, np.uint64(0)).sum(axis=0, dtype=np.uint64) for chosen in self._chosen]
        return np.stack(rows)
