"""Calls actors as awaitable peers and turns Ray's errors into ours.

Only this file knows both. A `ProcessHandle` is called as an actor's handle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError, TaskCancelledError

from weightsync.actors.ray.adoption import Adoption, method_of
from weightsync.actors.ray.claim import ClaimedPeer
from weightsync.actors.ray.node_links import Served
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.publish_notices import HolderNode, PublishNotices, TrainerNode
from weightsync.actors.servers.handle import Joined, ProcessHandle, no_log
from weightsync.actors.servers.peers import ServedTrainer
from weightsync.actors.servers.rank import JoinedRank
from weightsync.config import Ports, TlsFiles
from weightsync.errors import (
    ConfigError,
    EngineError,
    PeerError,
    PeerLostError,
    RestartedError,
    WeightSyncError,
)
from weightsync.faults import Fault
from weightsync.node.link import Link
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.handles import BufferHandle
from weightsync.protocol.messages import Attached, PublishReport, PublishTask
from weightsync.protocol.peers import EnginePeer, SharedPlan, TrainerPeer

LONG_S = 0.01
"""How long a trainer may publish before Ray is called, too."""


async def answer(peer: str, reference: Awaitable[Any]) -> Any:  # noqa: ANN401 (whatever the actor returns)
    """Await an actor's answer.

    Raises the actor's own WeightSyncError, PeerLostError if the actor's process is gone, or PeerError for any
    other error, also if Ray has lost the connection and not the process.
    """
    try:
        return await reference
    except ActorUnavailableError as error:
        raise PeerError(peer, f"it cannot be reached: {_cause(str(error))}") from error
    except (RayActorError, TaskCancelledError) as error:
        raise PeerLostError(peer, _cause(str(error))) from error
    except RayTaskError as error:
        if isinstance(error.cause, WeightSyncError):
            raise _named(error.cause, peer) from error
        raise PeerError(peer, f"{type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        raise PeerError(peer, f"{type(error).__name__}: {_cause(str(error))}") from error


def _named(error: WeightSyncError, peer: str) -> WeightSyncError:
    """Return `error` with the peer's name, which a process does not know before it is attached."""
    if isinstance(error, RestartedError):
        return RestartedError(peer)
    if isinstance(error, EngineError) and not error.engine:
        return type(error)(peer.removeprefix("engine "), *error.args[1:])
    return error


def _cause(text: str) -> str:
    """The first line of Ray's message; the last line if the actor's constructor raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"its constructor raised {lines[-1]}" if "creation task" in lines[0] else lines[0]


class Remote:
    """An actor as a peer: a method calls the actor's method of that name, after `prefix`.

    `remote_trainer`, `remote_engine` and `remote_holder` return a peer with the types of the methods.
    """

    node: Link | None = None

    def __init__(
        self,
        name: str,
        handle: ActorHandle[Any],
        prefix: str,
        adapter: AdapterSpec | None = None,
        adoption: Adoption | None = None,
    ) -> None:
        """With an `adapter`, methods call the actor's part for the adapter."""
        self.name, self.handle, self._prefix, self._adapter = name, handle, prefix, adapter
        self.adoption = adoption
        # An actor's part has a node of its own.
        self._of = adapter.name if adapter and isinstance(handle, ProcessHandle) else ""

    @property
    def key(self) -> Hashable:
        """Identity: equal for peers that call the same actor, or the same part of an actor."""
        return self.handle, self.adoption and self.adoption.key

    @property
    def has_new_link(self) -> bool:
        """Return True for a process that has joined again, or may, since it was connected."""
        return isinstance(self.handle, Joined) and self.node is not self.handle.link

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self.call(method, *args)

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        """Call the actor by its node, or by Ray what only the actor has, and what many actors get.

        The answer raises as `answer`, and ConfigError if the actor has no such method.
        """
        is_shared = any(isinstance(each, ObjectRef) for each in args)  # Ray copies it to each host once
        if self.node and method in self.node.methods and not is_shared:
            return self.node.call(method, *args, part=self._of)
        return self._call_by_ray(method, *args)

    async def _call_by_ray(self, method: str, *args: object) -> Any:  # noqa: ANN401 (whatever the actor returns)
        try:
            remote = self._remote(self._prefix + method)
        except AttributeError as error:
            remedy = "give the handle of an actor derived from TrainerShard, EngineActor or VllmActor"
            raise ConfigError(self.name, type(self.handle).__name__, remedy) from error
        return await answer(self.name, remote(*args))

    def _remote(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Return a function that calls a method of the actor. Raises AttributeError without such a method."""
        if self._adapter is None:
            return method_of(self.handle, method, self.adoption)
        return partial(method_of(self.handle, "sync_adapter", self.adoption), self._adapter, method)


class _Engine(Remote):
    """An engine's actor."""

    protocol: type = EnginePeer

    async def placements(self) -> list[Placement]:
        """Ask the actor for placements, with an object of Ray's store, as plans are sent.

        After a lost link, a host may get no objects for minutes while actors on it answer
        (https://github.com/ray-project/ray/pull/59807). Only sending an object shows this.
        """
        found: list[Placement] = await self.call("placements", ray.put(None))
        return found


class _Trainer(Remote):
    """A trainer's actor, which says during `publish` that weights may be read."""

    protocol: type = TrainerNode

    def __init__(
        self, name: str, handle: ActorHandle[Any], adapter: AdapterSpec | None, adoption: Adoption | None
    ) -> None:
        super().__init__(name, handle, "sync_", adapter, adoption)
        self._is_read_in_place = False
        self._expected: PublishNotices | None = None

    async def attach(self, plan: SharedPlan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        """Attach the trainer, and note whether holders read the weights in place."""
        self._is_read_in_place = send_buffer is None
        report: Attached = await self.call("attach", plan, trainer, send_buffer)
        return report

    def ask_readable(self, readable: asyncio.Future[None]) -> asyncio.Future[bool] | None:
        """Ask the trainer's node, if holders read the weights in place."""
        if not (self.node and self.node.is_dialled and self._is_read_in_place):
            return None
        self._expected = self.expect(readable)
        early: asyncio.Future[bool] = asyncio.ensure_future(self.node.call("readable", self._expected.ticket))
        early.add_done_callback(partial(_note, readable))
        return early

    def expect(self, readable: asyncio.Future[None]) -> PublishNotices:
        """Have the node's next notices resolve `readable`. `publish` has to get the ticket."""
        notices = PublishNotices(readable)
        if self.node:
            self.node.when_noticed = notices.came
        return notices

    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
        """Have the trainer publish. The node's notices arrive before Ray's answer."""
        expected, self._expected = self._expected, None
        if expected is None or expected.readable is not readable:
            expected = self.expect(readable)
        elif readable.done():
            report = await self._publish_in_place(task, expected.ticket)
            if report is not None:
                return report
        told = expected.report
        asked: asyncio.Future[PublishReport] = asyncio.ensure_future(
            self.call("publish", task, expected.ticket, self.node is not None)
        )
        asked.add_done_callback(no_log)
        try:
            await asyncio.wait([asked, told], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asked.cancel()
            raise
        return told.result() if told.done() else asked.result()

    async def _publish_in_place(self, task: PublishTask, ticket: int) -> PublishReport | None:
        """Have a readable trainer publish by its node. Returns None if that takes long.

        Then Ray is called, which knows whether the process lives, and gets the same report.
        """
        assert self.node
        called = asyncio.ensure_future(self.node.call("publish_in_place", task, ticket))
        called.add_done_callback(no_log)
        done, _ = await asyncio.wait([called], timeout=LONG_S)
        report: PublishReport | None = called.result() if done else None
        return report


def _note(readable: asyncio.Future[None], early: asyncio.Future[bool]) -> None:
    """Resolve `readable` if the trainer said so. `publish` raises the trainer's error, too."""
    if not early.cancelled() and not early.exception() and early.result() and not readable.done():
        readable.set_result(None)


class _JoinedTrainer(Remote):
    """A trainer rank that Ray did not start. Its node answers all calls."""

    protocol: type = ServedTrainer
    handle: JoinedRank

    def placement(self) -> Awaitable[Placement]:
        return self.handle.placement(self._of)

    def ask_readable(self, readable: asyncio.Future[None]) -> None:
        """Ask nothing: `publish` tells it."""


class _Holder(Remote):
    """A holder's actor. The process may still be starting, as a standby."""

    protocol: type = HolderNode

    def __init__(self, name: str, handle: ActorHandle[Any], becoming: asyncio.Future[None] | None) -> None:
        super().__init__(name, handle, "")
        self._becoming = becoming
        if becoming:
            becoming.add_done_callback(no_log)

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        return self._call_later(method, *args) if self._becoming else super().call(method, *args)

    async def _call_later(self, method: str, *args: object) -> Any:  # noqa: ANN401
        if self._becoming:
            await asyncio.shield(self._becoming)  # this call may be given up, and another follow
            self._becoming = None
        return await super().call(method, *args)


class _Part(_Holder):
    """One holder of a process that has several."""

    def __init__(
        self, name: str, handle: ActorHandle[Any], part: int, opening: asyncio.Future[None] | None
    ) -> None:
        super().__init__(name, handle, opening)
        self._part = part

    @property
    def key(self) -> Hashable:
        return self.handle, self._part

    def close(self) -> Awaitable[None]:
        """Free the holder's memory and sockets. The process continues."""
        return answer(self.name, self.handle.close_part.remote(self._part))

    def _remote(self, method: str) -> Callable[..., Awaitable[Any]]:
        return partial(self.handle.call_part.remote, self._part, method)


class _Actor(Protocol):
    """The methods of every actor of a fleet."""

    name: str
    handle: ActorHandle[Any]
    adoption: Adoption | None

    @property
    def key(self) -> Hashable: ...
    async def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None: ...


class RemoteTrainer(_Actor, Served, ClaimedPeer, TrainerPeer, Protocol):
    """A TrainerShard actor."""

    def expect(self, readable: asyncio.Future[None]) -> PublishNotices: ...

    async def placement(self) -> Placement: ...
    async def placement_so_far(self) -> Placement | None: ...


class RemoteEngine(_Actor, Served, ClaimedPeer, EnginePeer, Protocol):
    """An EngineActor or VllmActor. `EngineCalls` documents the methods."""

    async def placements(self) -> list[Placement]: ...
    async def watch(self) -> None: ...
    async def ping(self) -> None: ...


class RemoteHolder(_Actor, Served, HolderNode, Protocol):
    """A Holder actor. `Holder` documents the methods."""

    async def ready(self) -> tuple[str, str, Ports | None, TlsFiles | None]: ...
    async def watch(self) -> None: ...
    async def relay(self, trainers: Mapping[int, ActorHandle[Any]]) -> None: ...
    async def close(self) -> None: ...


def remote_trainer(
    name: str, handle: ActorHandle[Any], adapter: AdapterSpec | None = None, adoption: Adoption | None = None
) -> RemoteTrainer:
    """Return a trainer's actor or a `JoinedRank`, or its part for an adapter, as a peer `name`."""
    if isinstance(handle, JoinedRank):
        return cast("RemoteTrainer", _JoinedTrainer(name, handle, "sync_", adapter))
    return cast("RemoteTrainer", _Trainer(name, handle, adapter, adoption))


def remote_engine(
    name: str, handle: ActorHandle[Any], adapter: AdapterSpec | None = None, adoption: Adoption | None = None
) -> RemoteEngine:
    """Return an engine's actor, or the actor's part for an adapter, as a peer called `name`."""
    return cast("RemoteEngine", _Engine(name, handle, "sync_", adapter, adoption))


def remote_holder(
    name: str, handle: ActorHandle[Any], becoming: asyncio.Future[None] | None = None
) -> RemoteHolder:
    """Return a holder's actor as a peer called `name`. Calls wait for `becoming`, or raise its error."""
    return cast("RemoteHolder", _Holder(name, handle, becoming))


def remote_part(
    name: str, handle: ActorHandle[Any], part: int, opening: asyncio.Future[None]
) -> RemoteHolder:
    """Return part `part` of a `HolderParts` actor as a peer called `name`. Calls wait for `opening`."""
    return cast("RemoteHolder", _Part(name, handle, part, opening))
