"""The faults of a run, set in the fleet's processes before the faults' versions are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.faults import FaultPlan


class Injection:
    """Sets the faults of a plan."""

    def __init__(self, fleet: Fleet, timeout_s: float) -> None:
        self._fleet, self._timeout_s = fleet, timeout_s
        self._plan: FaultPlan | None = None
        self._armed = set[int]()

    async def begin(self, plan: FaultPlan) -> None:
        """Drop all faults, and set the faults of `plan` that name no version."""
        self._plan, self._armed = plan, set()
        calls = {process: peer.set_faults(process, (), plan.seed) for process, peer in self._peers().items()}
        (await gather_named(calls, "set_faults", self._timeout_s)).require()
        await self._set(plan, None)

    async def arm(self, version: int) -> None:
        """Set the faults of `version`, once."""
        if self._plan and version not in self._armed:
            self._armed.add(version)
            await self._set(self._plan, version)

    async def _set(self, plan: FaultPlan, version: int | None) -> None:
        calls = {}
        for process, peer in self._peers().items():
            due = [replace(fault, version=None) for fault in plan.for_(process) if fault.version == version]
            if due:
                calls[process] = peer.set_faults(process, due, plan.seed)
        (await gather_named(calls, "set_faults", self._timeout_s)).require()

    def _peers(self) -> dict[str, Any]:
        peers: dict[str, Any] = {f"trainer {i}": peer for i, (peer, _) in enumerate(self._fleet.trainers)}
        engines = {f"engine {name}": member.peer for name, member in self._fleet.engines.items()}
        return peers | self._fleet.named_holders() | engines
