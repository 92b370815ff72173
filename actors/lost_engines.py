"""Engines that stopped answering: they come back if they are heard again, or are replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle

from weightsync.actors.ray.daemon import await_daemon
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.process import PATIENCE_S, end_process
from weightsync.actors.ray.remote import Remote, RemoteEngine
from weightsync.actors.ray.watch import is_silence
from weightsync.actors.servers.handle import JoinedServer
from weightsync.config import SyncConfig
from weightsync.driver.connecting.linking import unlink_engine
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineBack
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import gather_named
from weightsync.driver.updating.controller import Controller
from weightsync.errors import WeightSyncError

logger = logging.getLogger("weightsync.actors")

_AGAIN_S = 0.5


class LostEngines:
    """Brings lost engines back.

    Attributes:
        respawner: starts another actor for an engine; None if engines cannot be respawned.
        silent: the actors that do not answer, by the engine's name.
    """

    def __init__(
        self,
        config: SyncConfig,
        fleet: Fleet,
        controller: Controller,
        registered: Callable[[], Mapping[str, ActorHandle[Any]]],
        remote: Callable[[str, ActorHandle[Any]], RemoteEngine],
        placements: Mapping[str, Sequence[Placement]],
        place: Callable[[str, ActorHandle[Any]], Awaitable[None]],
    ) -> None:
        """`registered` returns the actors of engines now. `place` makes an actor the engine of that name."""
        self._config, self._fleet, self._controller = config, fleet, controller
        self._registered, self._remote = registered, remote
        self._placements, self._place = placements, place
        self.respawner: Callable[[str], ActorHandle[Any]] | None = None
        self.silent: dict[str, ActorHandle[Any]] = {}
        self._cut_off = set[str]()
        self._checking = set[asyncio.Task[None]]()
        self._returning = set[asyncio.Task[None]]()

    def add(self, name: str, handle: ActorHandle[Any], error: WeightSyncError) -> None:
        """Note that an engine is lost, and find out whether its holders are lost, too."""
        self.silent[name] = handle
        self._controller.engine_group.lost(name, error)
        checking = asyncio.ensure_future(self._check_holders(name))
        self._checking.add(checking)
        checking.add_done_callback(self._checking.discard)

    def is_silent(self, handle: object) -> bool:
        """Return True if the engine of `handle` does not answer."""
        return any(each is handle for each in self.silent.values())

    def heard(self, name: str, handle: ActorHandle[Any]) -> None:
        """Note that an engine answers, which may have been lost."""
        if self.silent.get(name) is handle:
            self._controller.events.publish(EngineBack(name))

    async def checked(self) -> None:
        """Wait until it is known which holders are lost."""
        if self._checking:
            await asyncio.wait(self._checking, timeout=self._config.heartbeat_s)

    def joined(self, server: JoinedServer) -> None:
        """Have a server that was lost take part again, once it answers. It may be lost by joining again."""
        back = asyncio.ensure_future(self._take_back(server))
        self._returning.add(back)
        back.add_done_callback(self._returning.discard)

    async def _take_back(self, server: JoinedServer) -> None:
        link = server.link
        with suppress(WeightSyncError):
            await link.dialled()
        while names := [
            name
            for name, each in self._registered().items()
            if each is server and (name in self.silent or has_new_link(self._fleet.engines.get(name)))
        ]:
            if link.has_ended:
                return
            for name in names:
                self._controller.events.publish(EngineBack(name))
            await asyncio.sleep(_AGAIN_S)  # it may not be known to be lost yet, or is being given up

    def can_respawn(self, name: str) -> bool:
        """Return True if `respawn` can replace an engine."""
        handle = self._registered().get(name)
        return self.respawner is not None and handle is not None and not isinstance(handle, JoinedServer)

    async def respawn(self, name: str) -> bool:
        """End an engine's process, which may hang or be gone, and start a replacement.

        If nothing on the engine's host answers, wait until the engine answers or Ray says that it is gone, at
        most ``connect_timeout_s``. If the engine answers then, its process stays. Returns True if the process
        was replaced.

        Raises the errors of `respawner`, or a DeadlineError of phase ``respawn`` if `respawner` does not
        return within ``respawn_timeout_s``. An actor that `respawner` returns later is killed.
        """
        assert self.respawner is not None
        await self._check_holders(name)
        if name in self._cut_off and await self._is_heard(name):
            await self.rejoin(name)
            return False
        respawner, old, placements = self.respawner, self._registered()[name], self._placements.get(name, ())
        end_s = PATIENCE_S * (1 + len(placements))
        await await_daemon(lambda: end_process(old, placements), f"engine {name}", "end", end_s)
        self._controller.engine_group.enter([name], EngineState.DEAD)
        await unlink_engine(self._fleet, name, self._config.timeout_s)
        handle = await await_daemon(
            lambda: respawner(name),
            f"respawn() of engine {name}",
            "respawn",
            self._config.respawn_timeout_s,
            when_late=lambda late: _end_late(name, late, self._registered()),
        )
        await self._place(name, handle)
        self._cut_off.discard(name)
        return True

    async def _is_heard(self, name: str) -> bool:
        """Wait for an engine that is cut off. Returns whether it answered."""
        logger.warning("[engine %s] its host is lost: waiting for it, unless Ray gives it up", name)
        engine = self._remote(name, self._registered()[name])
        heartbeat_s, deadline = self._config.heartbeat_s, time.monotonic() + self._config.connect_timeout_s
        while time.monotonic() < deadline:
            began = time.monotonic()
            outcome = await gather_named({engine.name: engine.ping()}, "heartbeat", heartbeat_s)
            if not (error := outcome.failures.get(engine.name)):
                return True
            if not is_silence(error):
                return False
            await asyncio.sleep(max(0.0, began + heartbeat_s - time.monotonic()))
        return False

    async def _check_holders(self, name: str) -> None:
        """Have the next update connect without the holders of a silent engine, if they are silent, too."""
        member = self._fleet.engines[name]
        calls = {f"holder {i}": self._fleet.holders[i] for i in member.holders}
        pings = {holder: peer.ready() for holder, peer in calls.items() if isinstance(peer, Remote)}
        outcome = await gather_named(pings, "heartbeat", self._config.heartbeat_s)
        if outcome.failures and all(map(is_silence, outcome.failures.values())):
            self._cut_off.add(name)
        if outcome.failures and self._fleet.engines.get(name) is member:
            silent = ", ".join(outcome.failures)
            logger.warning("[engine %s] its host is lost: %s do not answer", name, silent)
            self._controller.connected = False

    async def rejoin(self, name: str) -> None:
        """Place an engine again that was DEAD since it was silent, and is heard. It is STALE afterwards.

        Calls from before, which may arrive only now, are not carried out. Raises as `place`.
        """
        await self._place(name, self._registered()[name])
        self.silent.pop(name, None)
        self._cut_off.discard(name)
        self._controller.engine_group.enter([name], EngineState.STALE)
        if not self._controller.can_refill(name):
            self._controller.connected = False  # it is attached, and takes part, with the next update

    def close(self) -> None:
        """Stop waiting for servers that joined again."""
        for returning in self._returning:
            returning.cancel()


def has_new_link(member: EngineMember | None) -> bool:
    """Return True if the next process of an engine's server has joined, or may."""
    return member is not None and isinstance(member.peer, Remote) and member.peer.has_new_link


def _end_late(name: str, handle: ActorHandle[Any], registered: Mapping[str, ActorHandle[Any]]) -> None:
    if isinstance(handle, ActorHandle) and handle not in registered.values() and ray.is_initialized():
        logger.warning("[engine %s] respawn() returned too late, its actor is killed", name)
        ray.kill(handle)
