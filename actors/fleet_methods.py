"""The part of the public API that says what a fleet has, and what it serves."""

from __future__ import annotations

from typing import Any

from ray.actor import ActorHandle

from weightsync.actors.membership import Membership, is_connected
from weightsync.actors.ray.remote import Remote
from weightsync.actors.servers.handle import as_registered
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.healing.healing import Healer
from weightsync.driver.updating.controller import Controller
from weightsync.errors import StateError
from weightsync.plan import Plan
from weightsync.report import HealReport, Link


class FleetMethods:
    """Base of `WeightSync`, which sets the attributes."""

    _controller: Controller
    _fleet: Fleet
    _healer: Healer
    _members: Membership

    @property
    def plan(self) -> Plan:
        """The plan in use.

        Raises:
            StateError: before `connect`.
        """
        if self._controller.plan is None:
            raise StateError("call connect() before plan")
        return self._controller.plan

    def links(self) -> list[Link]:
        """List the bytes of an update by sender and engine rank.

        Raises:
            StateError: before `connect`.
        """
        return self._controller.links()

    @property
    def version(self) -> int:
        """The newest committed version, 0 before the first."""
        return self._controller.version

    def engine_versions(self) -> dict[str, int]:
        """Return the version that each engine serves, is READY to serve, or sleeps with; 0 without one."""
        return {name: member.record.version for name, member in self._fleet.engines.items()}

    def engine_states(self) -> dict[str, EngineState]:
        """Return the state of each engine."""
        return {name: member.record.state for name, member in self._fleet.engines.items()}

    def serving(self, *, any_version: bool = False) -> dict[str, Any]:
        """Return the engines that can take requests: those that serve the newest version that any serves.

        They are given as they were registered, as actors' handles or URLs.

        Engines of a deployment are among them if all of it serves that version.

        `any_version`: also those that serve an earlier one, as after they did not pause in time.
        """
        registered = self._members.engines
        serving = {name: registered[name] for name in self._fleet.serving(any_version) if name in registered}
        return {n: as_registered(each) for n, each in serving.items() if is_connected(self._fleet, n, each)}

    def trainers(self) -> tuple[ActorHandle[Any], ...]:
        """The actors of the registered trainer ranks, in rank order. Empty if Ray did not start them."""
        return tuple(each for each in self._members.trainers if isinstance(each, ActorHandle))

    def engines(self) -> dict[str, Any]:
        """The actor or URL of each registered engine in any state.

        Send requests only to engines of `serving`. After a respawn this is the new actor.
        """
        return {name: as_registered(handle) for name, handle in self._members.engines.items()}

    def holders(self) -> dict[str, ActorHandle[Any]]:
        """The actors that hold and move the bytes, by the names that errors give them: ``holder 0``, …

        Empty before `connect`, and without holders beside servers. ``plan.members`` maps the same numbers to
        trainers and engine ranks.
        """
        holders = self._fleet.named_holders().items()
        handles = {name: each.handle for name, each in holders if isinstance(each, Remote)}
        return {name: handle for name, handle in handles.items() if isinstance(handle, ActorHandle)}

    def checkpoint_readers(self, name: str) -> dict[str, ActorHandle[Any]]:
        """The actors that read a registered checkpoint, by Ray's id of their host.

        Raises ConfigError for a checkpoint that is not registered.
        """
        return dict(self._members.checkpoints[name].shards)

    @property
    def heals(self) -> tuple[HealReport, ...]:
        """All heals so far, in the order in which engines came back."""
        return tuple(self._healer.heals)
