"""Digests of the last version, which trainers and engines keep for a driver that asks what differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsync.memory.digest_reduction import DigestReduction
from weightsync.memory.fingerprints import fingerprint
from weightsync.plan import Plan, RankLayout
from weightsync.protocol.messages import Digests, Loaded, LoadReport, Published, PublishReport
from weightsync.protocol.timing import Span


class TrainerDigests:
    """Digests that a trainer rank published last.

    Attributes:
        table: its shares of the tensors' digests, uint64[num_tensors].
    """

    def __init__(self, plan: Plan) -> None:
        self._frozen = plan.frozen
        self.table: Digests = np.zeros(len(plan.tensors), np.uint64)

    def report(self, published: Published, spans: Sequence[Span]) -> PublishReport:
        """Keep the table, and return what the driver gets in its place."""
        self.table = published.digests
        frozen = fingerprint(self.table, self._frozen)
        return PublishReport(fingerprint(self.table), frozen, published.nonfinite, spans)


class EngineDigests:
    """Digests that an engine's ranks took last, added up.

    Attributes:
        table: digests of whole tensors, uint64[num_ranks, num_tensors], as `DigestReduction` returns them.
    """

    def __init__(self, plan: Plan, layouts: Sequence[RankLayout]) -> None:
        """Find the replicas of every tensor. `layouts` are the engine's, by rank."""
        self._reduce = DigestReduction(plan, layouts)
        self.table: Digests = np.zeros((len(layouts), len(plan.tensors)), np.uint64)

    def report(self, ranks: Sequence[Loaded]) -> LoadReport:
        """Add up the ranks' tables, keep the result, and return what the driver gets in its place."""
        self.table = self._reduce([rank.digests for rank in ranks])
        return LoadReport(fingerprint(self.table), [rank.spans for rank in ranks])
