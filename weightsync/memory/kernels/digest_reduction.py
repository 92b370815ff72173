"""Adds up the digests of an engine's ranks to digests of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.plan import Plan
from weightsync.plan.broadcast.held_boxes import held_boxes
from weightsync.plan.layout.column import Positions, number_rows
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.messages import Digests


class DigestReduction:
    """Adds up digests so that each replica is checked.

    Ranks with the same boxes of a tensor are replicas. A row of the result uses one replica of every part.
    """

    def __init__(self, plan: Plan, layouts: Sequence[LayoutTable]) -> None:
        """Find the replicas of every tensor. `layouts` has the engine's layouts, by rank."""
        num_ranks = len(layouts)
        chosen = np.zeros((num_ranks, num_ranks, len(plan.tensors)), np.bool_)
        held = held_boxes(plan, layouts)
        rank, tensor = np.nonzero(held >= 0)
        order = np.lexsort((rank, held[rank, tensor], tensor))
        rank, tensor = rank[order], tensor[order]
        nth, count = _places(number_rows([tensor, held[rank, tensor]]))
        for turn in range(num_ranks):
            its = nth == turn % count
            chosen[turn, rank[its], tensor[its]] = True
        # Most tensors have no replicas, and are the same in every row.
        self._replicated: npt.NDArray[np.intp] = np.flatnonzero((chosen != chosen[0]).any(axis=(0, 1)))
        self._first, self._others = chosen[0], chosen[1:, :, self._replicated]

    def __call__(self, shares: Sequence[Digests]) -> npt.NDArray[np.uint64]:
        """Return digests of whole tensors, uint64[num_ranks, num_tensors]; every share is in some row."""
        held = np.stack(shares)
        rows = np.repeat(_added(held, self._first)[None], len(held), axis=0)
        replicas = held[:, self._replicated]
        for row, chosen in zip(rows[1:], self._others, strict=True):
            row[self._replicated] = _added(replicas, chosen)
        return rows


def _places(groups: Positions) -> tuple[Positions, Positions]:
    """Return the index of each row within its group, and the group's size. Groups ascend."""
    count = np.bincount(groups)
    return np.arange(len(groups)) - np.repeat(np.cumsum(count) - count, count), np.repeat(count, count)


def _added(held: npt.NDArray[np.uint64], chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    # Engines are paused while this runs. Unlike a masked sum, einsum makes no copy of `held`.
    total: npt.NDArray[np.uint64] = np.einsum("rt,rt->t", held, chosen)
    return total
