"""The digests of an engine's last load. A driver only reads them to name tensors that differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsync.memory.kernels.digest_reduction import DigestReduction
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.plan import Plan
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.messages import Attached, Digests, Loaded, LoadReport


class EngineDigests:
    """The last digests of an engine's ranks, added up.

    Attributes:
        table: digests of whole tensors, uint64[num_ranks, num_tensors], as `DigestReduction` returns them.
    """

    @collector_paused
    def __init__(self, plan: Plan, layouts: Sequence[LayoutTable]) -> None:
        """Find the replicas of every tensor. `layouts` has the engine's layouts, by rank."""
        names = {meta.name for meta in plan.tensors}
        self._plan = plan
        self._reduce = DigestReduction(plan, [layout.for_tensors(names) for layout in layouts])
        self._reduce_parts: DigestReduction | None = None
        self.table: Digests = np.zeros((len(layouts), len(plan.tensors)), np.uint64)

    @collector_paused
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
