"""Finds trainer ranks that hold the same box of a tensor, and other bytes of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.errors import ReplicasDifferError
from weightsync.plan import Plan
from weightsync.plan.layout.replicas import Replicas
from weightsync.protocol.messages import Digests, PublishReport, combine

logger = logging.getLogger("weightsync.driver")


class Agreement:
    """Chooses the boxes that ranks compare next: all boxes first, then one round in each update."""

    def __init__(self, config: SyncConfig, fleet: Fleet, plan: Plan, replicas: Replicas) -> None:
        self._config, self._fleet, self._plan = config, fleet, plan
        self._replicas: Replicas | None = replicas
        self._round = -1

    def compare_all(self) -> None:
        """Have the next `publish` compare all boxes."""
        self._round = -1

    @property
    def compares_all(self) -> bool:
        """Return True if the next `publish` compares all boxes, and there are some."""
        return self._replicas is not None and self._round < 0

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds of the next `publish`, see `PublishTask`."""
        if self._replicas is None:
            return ()
        return tuple(range(self._replicas.num_rounds)) if self._round < 0 else (self._round,)

    async def require(
        self, version: int, answers: Mapping[str, PublishReport], rounds: tuple[int, ...]
    ) -> None:
        """Raise ReplicasDifferError if ranks have different digests of a box, which they took in `rounds`."""
        if not rounds or self._replicas is None:
            return
        words = [each.agreement for each in answers.values() if each.agreement is not None]
        if len(words) < len(answers):
            silent = next(name for name, each in answers.items() if each.agreement is None)
            about = "[driver] replicas are not compared: the source of %s has no `compare_replicas`"
            logger.warning(about, silent)
            self._replicas = None
        elif combine(words).any():
            self.compare_all()
            raise ReplicasDifferError(version, await self._differing(self._replicas, rounds))
        else:
            self._round = (rounds[-1] + 1) % self._replicas.num_rounds

    async def _differing(self, replicas: Replicas, rounds: tuple[int, ...]) -> list[tuple[str, list[str]]]:
        """Ask ranks for their digests. Returns the ranks that differ, and their tensors."""
        calls = {f"trainer {i}": each.replica_digests() for i, (each, _) in enumerate(self._fleet.trainers)}
        outcome = await gather_named(calls, "verify", self._config.timeout_s)
        for name, error in outcome.failures.items():
            logger.warning("[%s] its digests are not known: %s", name, error)
        found = {rank: outcome.answers[name] for rank, name in enumerate(calls) if name in outcome.answers}
        differing = dissenters(replicas, found, rounds)
        names = [meta.name for meta in self._plan.tensors]
        return [(f"trainer {rank}", [names[t] for t in tensors]) for rank, tensors in differing.items()]


def dissenters(
    replicas: Replicas, found: Mapping[int, Digests], rounds: Sequence[int]
) -> Mapping[int, Sequence[int]]:
    """Return the tensors of each rank whose digest of a box the majority contradicts.

    The majority is more than half of the ranks that hold the box. Without a majority, all these ranks are
    returned. `found` has the digests of `Compared`, by rank.
    """
    parts = []
    for rank, digests in found.items():
        claims = replicas.claims(rank)
        rows = np.isin(claims.round, rounds)
        parts.append((rank, claims.tensor[rows], claims.box[rows], digests[rows]))
    num_boxes = max((int(box.max(initial=-1)) + 1 for _, _, box, _ in parts), default=0)
    leader, (lead, votes, size) = np.zeros(num_boxes, np.uint64), np.zeros((3, num_boxes), np.int64)
    for _, _, box, digests in parts:  # the vote of Boyer and Moore: a majority comes out as the leader
        is_new = lead[box] == 0
        leader[box[is_new]] = digests[is_new]
        lead[box] += np.where(leader[box] == digests, 1, -1)
        size[box] += 1
    for _, _, box, digests in parts:
        votes[box] += leader[box] == digests
    leader_is_right = 2 * votes > size
    differing = {}
    for rank, tensor, box, digests in parts:
        is_right = (votes == size)[box] | (leader_is_right[box] & (leader[box] == digests))
        if tensors := np.unique(tensor[~is_right]).tolist():
            differing[rank] = tensors
    return differing
