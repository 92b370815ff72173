"""Claims on actors: one WeightSync at a time drives an actor.

A claim ends when the WeightSync closes or the driver dies.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, OwnerDiedError, RayError

from weightsync.actors.ray.daemon import await_daemon
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.errors import RestartedError, StateError, WeightSyncError

_LOST_S = 4.0
"""Ray reports a dead object owner within one second, or three on a busy host."""
_POLL_S = 0.1
_HERE = uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Claim:
    """One WeightSync's claim on an actor.

    Attributes:
        run: different for each WeightSync.
        process: different for each process.
        holder: the WeightSync, as errors name it.
        owned: an object that Ray drops when the claiming process dies; in a tuple, so that it travels as a
            reference.
    """

    run: str
    process: str
    holder: str
    owned: tuple[ObjectRef[Any]]


class TakenError(StateError):
    """Another WeightSync has the actor."""


class Claimable:
    """Base of trainer and engine actors that records which WeightSync uses them."""

    _claim: Claim | None = None

    def sync_claim(self, claim: Claim, instead_of: str = "") -> Claim | None:
        """Accept `claim` and return None, or return the claim that already holds this actor.

        `instead_of`: the `Claim.run` of a claim to replace, because that claim's driver is dead.
        """
        if self._claim is not None and self._claim.run not in (claim.run, instead_of):
            return self._claim
        self._claim = claim
        return None

    def sync_release(self, run: str) -> None:
        """End the claim with this `Claim.run`. Any other claim stays."""
        if self._claim is not None and self._claim.run == run:
            self._claim = None

    def _require_claim(self) -> None:
        """Raise RestartedError in the next process of an actor, which nobody has claimed yet."""
        if self._claim is None:
            raise RestartedError


class ClaimedPeer(Protocol):
    """A user's actor, which one WeightSync at a time may drive. `Claimable` documents the methods."""

    name: str
    handle: ActorHandle[Any]

    async def claim(self, claim: Claim, instead_of: str) -> Claim | None: ...
    async def release(self, run: str) -> None: ...


class Claims:
    """The claims of one WeightSync on the actors that it has connected."""

    def __init__(self, name: str | None) -> None:
        """`name`: the name that the user gave to the WeightSync."""
        self._name = name
        self._mine: Claim | None = None
        self._held: dict[ActorHandle[Any], ClaimedPeer] = {}
        self._looks: dict[str, asyncio.Task[bool]] = {}

    async def acquire(self, peer: ClaimedPeer) -> None:
        """Claim an actor, again if it may have another process. Replaces the claim of a dead driver.

        Raises TakenError, which names the other WeightSync, if that driver is alive.
        """
        self._mine = self._mine or _claim(self._name)
        other = await peer.claim(self._mine, "")
        if other is not None and not await self._lives(other):
            other = await peer.claim(self._mine, other.run)
        if other is not None:
            raise TakenError(
                f"{peer.name} is connected to another WeightSync, {other.holder}: close() that one first"
            )
        self._held[peer.handle] = peer

    async def release(self, staying: Collection[ActorHandle[Any]] = ()) -> None:
        """Release all actors except `staying`. Actors that do not answer in time release later."""
        leaving = {handle: peer for handle, peer in self._held.items() if handle not in staying}
        self._held = {handle: peer for handle, peer in self._held.items() if handle in staying}
        if leaving and self._mine and ray.is_initialized():
            # An engine and the replacement have the same name, so the calls need a number.
            each = enumerate(leaving.values())
            calls = {f"{peer.name} {i}": _released(peer, self._mine.run) for i, peer in each}
            await gather_named(calls, "release", GRACE_S)

    async def _lives(self, claim: Claim) -> bool:
        """Return True if the claiming process is alive or stopped.

        This is checked once for all actors of the process.
        """
        if claim.process == _HERE:
            return True
        if claim.run not in self._looks:
            holder = claim.holder
            look = await_daemon(lambda: _is_owned(claim.owned[0]), holder, "claim", 2 * _LOST_S)
            self._looks[claim.run] = asyncio.ensure_future(look)
        try:
            return await asyncio.shield(self._looks[claim.run])
        finally:
            self._looks.pop(claim.run, None)


def _claim(name: str | None) -> Claim:
    job = ray.get_runtime_context().get_job_id()
    named = f"{name!r} " if name else ""
    holder = f"{named}of process {os.getpid()} on {platform.node()}, Ray job {job}"
    return Claim(uuid.uuid4().hex, _HERE, holder, (ray.put(holder),))


def _is_owned(owned: ObjectRef[Any]) -> bool:
    """Return True if the object's owner is alive.

    A copy may outlive the owner by a moment, hence the polling.
    """
    deadline = time.monotonic() + _LOST_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            ray.get(owned, timeout=left)
        except OwnerDiedError:
            return False
        except GetTimeoutError:
            return True  # a stopped owner may continue
        except RayError:
            return False  # the host is gone
        time.sleep(_POLL_S)
    return True


async def _released(peer: ClaimedPeer, run: str) -> None:
    try:
        await peer.release(run)
    except WeightSyncError:
        """The actor has ended, so the claim has ended."""
