"""Compares the engines' tensors with the published tensors, and names the differences."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import gather_named
from weightsync.driver.verifying.live_digests import LiveDigests
from weightsync.driver.verifying.trainers import Trainers
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.plan import Plan
from weightsync.protocol.messages import Digests, Fingerprint, LoadReport, combine
from weightsync.text import count_text

logger = logging.getLogger("weightsync.driver")

UNNAMED = "an unknown tensor"
"""Stands for a name where the process that knows the digests does not answer."""


class Comparison:
    """Compares fingerprints. If some differ, it asks for the digests behind them.

    Attributes:
        tables: the digests that trainers gave last, by the trainer's name.
        proofs: the comparison that each correct engine passed, see `SyncReport.proofs`.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet, trainers: Trainers, live: LiveDigests) -> None:
        self._config, self._fleet, self._trainers = config, fleet, trainers
        self.tables: Mapping[str, Digests] = {}
        self.proofs: dict[str, str] = {}
        self._live = live

    async def wrong(
        self, plan: Plan, loaded: Mapping[str, LoadReport], expected: Fingerprint
    ) -> dict[str, list[str]]:
        """Return the tensors that differ from the `expected` fingerprint, by engine, or `UNNAMED`.

        An engine that converts tensors also gets the ranks whose live parameters differ from those of an
        equal engine.
        """
        wrong: dict[str, list[str]] = {name: [] for name in loaded}
        differ = [
            name
            for name, report in loaded.items()
            if not report.are_copied and (report.fingerprints != expected).any()
        ]
        if differ:
            held = await self._held({name: self._fleet.engines[name] for name in differ})
            published = await self._published(expected)
            for name in differ:
                wrong[name] = _differing(plan, held.get(name), published) or [UNNAMED]
        right = {name: report for name, report in loaded.items() if not wrong[name]}
        if self._live.right or any(any(report.live) for report in right.values()):
            wrong |= self._live.unlike(right, expected)
        self.proofs |= {name: self._proof(name, report) for name, report in right.items() if not wrong[name]}
        return wrong

    def _proof(self, name: str, report: LoadReport) -> str:
        if report.are_live:
            return "live weights"
        if report.are_copied:
            return "live weights with what its loader had made of them"
        num_alike = self._live.num_alike(name)
        alike = f"{count_text(num_alike, 'engine')} alike" if num_alike else ""
        if report.are_compared:
            return "live weights with what was quantised" + (f" and with {alike}" if alike else "")
        if not any(report.live):
            return "what its loader got"
        if alike:
            return f"what its loader got, and live weights with {alike}"
        return "what its loader got; no engine is alike"

    async def changed_frozen(self, plan: Plan, version: int) -> str:
        """Return the first frozen tensor that trainers changed since `version`, or `UNNAMED`."""
        holding = [(n, each) for n, each in self._fleet.live().items() if each.record.version == version]
        held = next(iter((await self._held(dict(holding[:1]))).values()), None)  # one is enough
        names = {plan.tensors[i].name for i in plan.frozen}
        changed = _differing(plan, held, await self._published())
        return next((name for name in changed if name in names), UNNAMED)

    async def _held(self, members: Mapping[str, EngineMember]) -> Mapping[str, Digests]:
        calls = {name: member.peer.digests() for name, member in members.items()}
        outcome = await gather_named(calls, "verify", self._config.timeout_s)
        for name, error in outcome.failures.items():
            logger.warning("[engine %s] its digests are not known: %s", name, error)
        return outcome.answers

    async def _published(self, expected: Fingerprint | None = None) -> Digests | None:
        """Add up the trainers' tables. Returns None if one is missing, or the sum is not as `expected`."""
        self.tables = await self._trainers.digests()
        if len(self.tables) < len(self._fleet.trainers):
            return None
        table = combine([*self.tables.values()])
        return table if expected is None or (fingerprint(table) == expected).all() else None


def _differing(plan: Plan, held: Digests | None, published: Digests | None) -> list[str]:
    if held is None or published is None:
        return []
    return [plan.tensors[i].name for i in np.flatnonzero((held != published).any(axis=0))]
