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
from weightsync.plan.replicas import NUM_ROUNDS, Replicas
from weightsync.protocol.messages import Digests, PublishReport, combine

logger = logging.getLogger("weightsync.driver.trainers")

_ALL = tuple(range(NUM_ROUNDS))


class Agreement:
    """Which boxes the ranks that hold them compare next: all of them first, then one round in each update.

    Attributes:
        rounds: the rounds of the next `publish`, see `PublishTask`.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self._plan: Plan | None = None
        self.rounds: tuple[int, ...] = ()

    @property
    def compares_all(self) -> bool:
        """Whether the next `publish` compares all boxes."""
        return self.rounds == _ALL

    def begin(self, plan: Plan) -> None:
        """Begin with the first update of a connection."""
        self._plan = plan
        self.compare_all()

    def compare_all(self) -> None:
        """Have the next `publish` compare all boxes."""
        self.rounds = _ALL if self._plan and self._plan.replicas else ()

    async def require(
        self, version: int, answers: Mapping[str, PublishReport], rounds: tuple[int, ...]
    ) -> None:
        """Raise ReplicasDifferError if digests of one box differ, which ranks took for `rounds`."""
        plan = self._plan
        if not rounds or plan is None:
            return
        words = [each.agreement for each in answers.values() if each.agreement is not None]
        if len(words) < len(answers):
            silent = next(name for name, each in answers.items() if each.agreement is None)
            logger.warning(
                "[driver] replicas are not compared: the source of %s has no `compare_replicas`", silent
            )
            self._plan, self.rounds = None, ()
        elif combine(words).any():
            self.compare_all()
            raise ReplicasDifferError(version, await self._differing(plan, rounds))
        else:
            self.rounds = ((rounds[-1] + 1) % NUM_ROUNDS,)

    async def _differing(self, plan: Plan, rounds: tuple[int, ...]) -> list[tuple[str, list[str]]]:
        """Ask ranks for their digests. Returns the names of those that differ, and of the tensors."""
        calls = {f"trainer {i}": each.replica_digests() for i, (each, _) in enumerate(self._fleet.trainers)}
        outcome = await gather_named(calls, "verify", self._config.timeout_s)
        for name, error in outcome.failures.items():
            logger.warning("[%s] its digests are not known: %s", name, error)
        assert plan.replicas
        found = {rank: outcome.answers[name] for rank, name in enumerate(calls) if name in outcome.answers}
        differing = dissenters(plan.replicas, found, rounds)
        return [(f"trainer {i}", [plan.tensors[t].name for t in tensors]) for i, tensors in differing.items()]


def dissenters(
    replicas: Replicas, found: Mapping[int, Digests], rounds: Sequence[int]
) -> Mapping[int, Sequence[int]]:
    """Return the tensors of each rank that has another digest of a box than more than half of its holders.

    Without such a majority, all holders are returned. `found` has the digests of `Compared`, by rank.
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
