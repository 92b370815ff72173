"""The digests of an engine's last load. A driver only reads them to name tensors that differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.plan import Plan
from weightsync.plan.broadcast.held_boxes import held_boxes
from weightsync.plan.layout.column import Positions, number_rows
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.messages import Attached, Digests, Loaded, LoadReport


class DigestReduction:
    """Adds up digests so that each replica is checked.

    Ranks with the same boxes of a tensor are replicas. A row of the result uses one replica of every part.
    """

    def __init__(self, plan: Plan, layouts: Sequence[LayoutTable]) -> None:
        """Find the replicas of every tensor. `layouts` has the engine's layouts, by rank."""
        chosen = _turns(plan, layouts) if len(layouts) > 1 else np.ones((1, 1, len(plan.tensors)), np.bool_)
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


@collector_paused
def _turns(plan: Plan, layouts: Sequence[LayoutTable]) -> npt.NDArray[np.bool_]:
    """Choose one replica of each box, another in each turn: bool[turn, rank, tensor]."""
    num_ranks, names = len(layouts), {meta.name for meta in plan.tensors}
    chosen = np.zeros((num_ranks, num_ranks, len(plan.tensors)), np.bool_)
    held = held_boxes(plan, [layout.for_tensors(names) for layout in layouts])
    rank, tensor = np.nonzero(held >= 0)
    order = np.lexsort((rank, held[rank, tensor], tensor))
    rank, tensor = rank[order], tensor[order]
    nth, count = _places(number_rows([tensor, held[rank, tensor]]))
    for turn in range(num_ranks):
        its = nth == turn % count
        chosen[turn, rank[its], tensor[its]] = True
    return chosen


def _places(groups: Positions) -> tuple[Positions, Positions]:
    """Return the index of each row within its group, and the group's size. Groups ascend."""
    count = np.bincount(groups)
    return np.arange(len(groups)) - np.repeat(np.cumsum(count) - count, count), np.repeat(count, count)


def _added(held: npt.NDArray[np.uint64], chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    # Engines are paused while this runs. Unlike a masked sum, einsum makes no copy of `held`.
    total: npt.NDArray[np.uint64] = np.einsum("rt,rt->t", held, chosen)
    return total


class EngineDigests:
    """The last digests of an engine's ranks, added up.

    Attributes:
        table: digests of whole tensors, uint64[num_ranks, num_tensors], as `DigestReduction` returns them.
    """

    def __init__(self, plan: Plan, layouts: Sequence[LayoutTable]) -> None:
        """Find the replicas of every tensor. `layouts` has the engine's layouts, by rank."""
        self._plan = plan
        self._reduce = DigestReduction(plan, layouts)
        self._reduce_parts: DigestReduction | None = None
        self.table: Digests = np.zeros((len(layouts), len(plan.tensors)), np.uint64)

    def attach(self, ranks: Sequence[Attached]) -> None:
        """Record the boxes that holders may read for each rank in place of whole tensors."""
        parts = [rank.live.reads for rank in ranks if rank.live and rank.live.reads]
        self._reduce_parts = DigestReduction(self._plan, parts) if len(parts) == len(ranks) else None

    def report(self, ranks: Sequence[Loaded]) -> LoadReport:
        """Add up the ranks' tables, store the sum, and return the driver's short report."""
        reduce = self._reduce_parts if all(rank.are_parts for rank in ranks) else self._reduce
        assert reduce
        self.table = reduce([rank.digests for rank in ranks])
        return LoadReport(
            fingerprint(self.table),
            [rank.spans for rank in ranks],
            [rank.live for rank in ranks],
            all(rank.are_live for rank in ranks),
            all(rank.are_copied for rank in ranks),
            all(rank.are_compared for rank in ranks),
            all(rank.takes_parts for rank in ranks) and self._reduce_parts is not None,
        )
