"""Processes that Ray did not start, in place of the handles of Ray's actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeAlias

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from weightsync.actors.ray.placement import Placement
from weightsync.actors.servers.peers import ServedEngine, ServedHolder
from weightsync.config import Ports
from weightsync.errors import PeerLostError, WeightSyncError
from weightsync.node.calls import methods_of
from weightsync.node.link import Link
from weightsync.node.messages import NodeOffer
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.host_id import host_id


class ProcessHandle:
    """A process behind a link, called as an actor's handle: ``handle.load.remote()``.

    Attributes:
        link: the calls to the process.
    """

    _protocol: type = ServedHolder

    def __init__(self, link: Link) -> None:
        self.link = link

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = name.removeprefix("sync_")
        if method not in methods_of(self._protocol):
            raise AttributeError(name)
        return SimpleNamespace(remote=partial(self._call, method))

    async def _call(self, method: str, *args: object, part: str = "") -> Any:  # noqa: ANN401 - its answer
        given = [await each if isinstance(each, ObjectRef) else each for each in args]
        return await self.link.call(method, *given, part=part)

    def kill(self) -> None:
        """Have the process end."""
        self.link.end(PeerLostError(self.link.name, "it was ended"))


class Joined(ProcessHandle):
    """A process that joins by itself, and starts its holders' processes. Has no link before `expect`."""

    def __init__(self) -> None:
        self._remote = frozenset[tuple[str, str]]()
        self._holders: list[Link] = []
        self._numbers = count()

    def expect(self, name: str, again_s: float) -> None:
        """Give a process that has no link, or whose link has ended, a new one. It ended its holders, too.

        `name`: the process's name in errors from now on.
        """
        if "link" not in vars(self) or self.link.has_ended:
            self.link = Link(name, self._protocol, again_s)
            for holder in self._holders:
                holder.end(PeerLostError(holder.name, f"{self} has left"))
            self._holders.clear()
            self._remote = frozenset()
        self.link.name = name

    @property
    def sync_claim(self) -> SimpleNamespace:
        """Claim nothing: the process has one driver, the one that it has joined."""
        return SimpleNamespace(remote=_nothing)

    sync_release = sync_claim

    @property
    def sync_adapter(self) -> SimpleNamespace:
        """Call a method of one adapter, a part of the process, as of an actor."""
        return SimpleNamespace(remote=self._call_part)

    async def _call_part(self, spec: AdapterSpec, method: str, *args: object) -> Any:  # noqa: ANN401
        if method in ("sync_claim", "sync_release"):
            return None
        return await self._call(method.removeprefix("sync_"), *args, part=spec.name)

    def _placed(self, found: Sequence[Placement]) -> list[Placement]:
        """Return the ranks' placements. Ray starts the holders of processes on this driver's own host."""
        here, node = host_id(), ray.get_runtime_context().get_node_id()
        self._remote |= {each.key for each in found if each.node != here}
        return [replace(each, node=node) if each.node == here else each for each in found]

    def starts(self, placement: Placement) -> bool:
        """Return True if this process starts the holder there, and not Ray."""
        return placement.key in self._remote

    def start_holder(
        self,
        name: str,
        placement: Placement,
        transport: str,
        ports: Ports | None,
        offer: Callable[[Link], NodeOffer],
    ) -> ProcessHandle:
        """Have it start a holder's process. Calls to the holder wait until it has dialled."""
        link, number = Link(name, ServedHolder, again_s=self.link.again_s), next(self._numbers)
        handle = _ServedHolder(link, self, number)
        self._holders.append(handle.link)
        settings = number, name, placement, transport, ports, offer(handle.link)
        starting = asyncio.ensure_future(self._call("start_holder", *settings))
        starting.add_done_callback(partial(_note, handle.link))
        return handle


class JoinedServer(Joined):
    """An engine in a server that somebody else started, at `url`."""

    _protocol = ServedEngine

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def __repr__(self) -> str:
        return self.url

    @property
    def sync_placements(self) -> SimpleNamespace:
        return SimpleNamespace(remote=self._placements)

    async def _placements(self, there: object) -> list[Placement]:
        return self._placed(await self._call("placements", there))

    async def _call_part(self, spec: AdapterSpec, method: str, *args: object) -> Any:  # noqa: ANN401
        if method != "sync_placements":
            return await super()._call_part(spec, method, *args)
        await self._call("keep_adapter", spec)
        return self._placed(await self._call("placements", *args, part=spec.name))


class _ServedHolder(ProcessHandle):
    def __init__(self, link: Link, beside: Joined, number: int) -> None:
        super().__init__(link)
        self._beside, self._number = beside, number

    def kill(self) -> None:
        super().kill()
        asyncio.ensure_future(self._beside._call("end_holder", self._number)).add_done_callback(no_log)


EngineHandle: TypeAlias = ActorHandle[Any] | JoinedServer


def as_registered(handle: EngineHandle) -> ActorHandle[Any] | str:
    """Return what the user gave for an engine."""
    return handle.url if isinstance(handle, JoinedServer) else handle


async def _nothing(*_: object) -> None:
    """Do nothing."""


def _note(link: Link, starting: asyncio.Future[Any]) -> None:
    if not starting.cancelled() and isinstance(error := starting.exception(), WeightSyncError):
        link.end(PeerLostError(link.name, f"it does not start: {error}"))


def no_log(ended: asyncio.Future[Any]) -> None:
    """Ask for the error, since asyncio logs errors that nobody asks for."""
    if not ended.cancelled():
        ended.exception()
