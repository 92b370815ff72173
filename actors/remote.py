"""Wraps Ray handles as awaitable peers and turns Ray's errors into ours.

Only this file knows both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from weightsync.actors.claim import Claim
from weightsync.actors.placement import Placement
from weightsync.errors import ConfigError, PeerError, PeerLostError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.faults import Fault
    from weightsync.plan import Plan, RankLayout, Reads
    from weightsync.protocol.handles import Attached, BufferHandle, DeviceHandle, Export, HostExport, Offer
    from weightsync.protocol.messages import (
        Digests,
        FeedTicket,
        Group,
        Moved,
        Part,
        Prepared,
        Published,
        Refilled,
        Samples,
        Snapshot,
        SnapshotHeader,
        SnapshotPart,
        UpdateTask,
    )
    from weightsync.protocol.timing import Span

__all__ = ["RemoteEngine", "RemoteHolder", "RemoteTrainer", "answer"]


async def answer(peer: str, reference: Awaitable[Any]) -> Any:  # noqa: ANN401 (whatever the actor returns)
    """Await an actor's answer.

    Raises the actor's own WeightSyncError, PeerLostError if its process is gone, or PeerError for any
    other error.
    """
    try:
        return await reference
    except (RayActorError, TaskCancelledError) as error:
        raise PeerLostError(peer, _cause(str(error))) from error
    except RayTaskError as error:
        if isinstance(error.cause, WeightSyncError):
            raise error.cause from error
        raise PeerError(peer, f"{type(error.cause).__name__}: {error.cause}") from error
    except RayError as error:
        raise PeerError(peer, f"{type(error).__name__}: {_cause(str(error))}") from error


def _cause(text: str) -> str:
    """The first line of Ray's message; the last line if the actor's constructor raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"its constructor raised {lines[-1]}" if "creation task" in lines[0] else lines[0]


class _Remote:
    def __init__(self, name: str, handle: ActorHandle[Any]) -> None:
        self.name, self.handle = name, handle
        self._spans: list[tuple[str, Sequence[Span]]] = []

    def take_spans(self) -> dict[str, Sequence[Span]]:
        """Return and clear the spans of this peer's last call, by rank."""
        spans, self._spans = self._spans, []
        return dict(spans)

    async def claim(self, claim: Claim, instead_of: str) -> Claim | None:
        """Claim the actor. Returns the claim that already holds it, or None."""
        other: Claim | None = await self._call("sync_claim", claim, instead_of)
        return other

    async def release(self, run: str) -> None:
        """End the claim with this `Claim.run`."""
        await self._call("sync_release", run)

    async def set_faults(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the actor's faults, see `weightsync.faults.set_faults`."""
        await self._call("sync_set_faults", who, faults, seed)

    async def _call(self, method: str, *args: object) -> Any:  # noqa: ANN401 (whatever the actor returns)
        try:
            remote = getattr(self.handle, method)
        except AttributeError as error:
            remedy = "give the handle of an actor derived from TrainerShard, EngineActor or VllmActor"
            raise ConfigError(self.name, type(self.handle).__name__, remedy) from error
        return await answer(self.name, remote.remote(*args))


class RemoteTrainer(_Remote):
    """A TrainerPeer that calls a TrainerShard actor."""

    async def placement(self) -> Placement:
        placement: Placement = await self._call("sync_placement")
        return placement

    async def layout(self) -> RankLayout:
        layout: RankLayout = await self._call("sync_layout")
        return layout

    async def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        attached: Attached = await self._call("sync_attach", plan, trainer, send_buffer)
        return attached

    async def publish(self, count: bool) -> Published:
        published: Published
        published, spans = await self._call("sync_publish", count)
        self._spans = [(self.name, spans)]
        return published


class RemoteEngine(_Remote):
    """An EnginePeer that calls an EngineActor or VllmActor."""

    async def placements(self) -> list[Placement]:
        placements: list[Placement] = await self._call("sync_placements")
        return placements

    async def layout(self) -> Sequence[RankLayout]:
        layouts: Sequence[RankLayout] = await self._call("sync_layout")
        return layouts

    async def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        attached: Sequence[Attached] = await self._call("sync_attach", plan, tickets, timeout_s)
        return attached

    async def pause(self, mode: str, timeout_s: float) -> None:
        await self._call("sync_pause", mode, timeout_s)

    async def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        await self._call("sync_sleep", level, mode, timeout_s)

    async def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]:
        digests: Sequence[Digests]
        digests, ranks = await self._call("sync_load", attempt, timeout_s)
        self._spans = [(f"{self.name} rank {rank}", spans) for rank, spans in enumerate(ranks)]
        return digests

    async def resume(self, version: int) -> None:
        await self._call("sync_resume", version)

    async def serving(self) -> int:
        version: int = await self._call("sync_serving")
        return version

    async def watch(self) -> None:
        await self._call("sync_watch")

    async def ping(self) -> None:
        await self._call("sync_ping")


class RemoteHolder(_Remote):
    """A HolderPeer that calls a Holder actor."""

    async def ready(self) -> tuple[str, str]:
        identity: tuple[str, str] = await self._call("ready")
        return identity

    async def prepare(self, plan: Plan, index: int, source: str) -> Prepared:
        prepared: Prepared = await self._call("prepare", plan, index, source)
        return prepared

    async def source(self, name: str, exports: Mapping[str, HostExport | None]) -> None:
        await self._call("source", name, exports)

    async def join(self, offers: Mapping[Group, str], timeout_s: float) -> None:
        await self._call("join", offers, timeout_s)

    async def accept(self, timeout_s: float) -> None:
        await self._call("accept", timeout_s)

    async def warm_up(self, timeout_s: float) -> None:
        await self._call("warm_up", timeout_s)

    async def route(self, reads: Reads, memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        await self._call("route", reads, memory)

    async def exchange(self, part: Part) -> str:
        rendezvous: str = await self._call("exchange", part)
        return rendezvous

    async def meet(self, rendezvous: str, timeout_s: float) -> None:
        await self._call("meet", rendezvous, timeout_s)

    async def move(self, attempt: int, feeding: bool, task: UpdateTask, timeout_s: float) -> Moved:
        moved: Moved = await self._call("move", attempt, feeding, task, timeout_s)
        self._spans = [(self.name, [moved.span])]
        return moved

    async def digests(self) -> Digests:
        digests: Digests = await self._call("digests")
        return digests

    async def abort(self, cause: str) -> None:
        await self._call("abort", cause)

    async def adopt(self, plan: Plan, engine: str) -> FeedTicket:
        ticket: FeedTicket = await self._call("adopt", plan, engine)
        return ticket

    async def link(self, engine: Export | None, trainer: Export | None = None) -> None:
        await self._call("link", engine, trainer)

    async def drop_engine(self) -> None:
        await self._call("drop_engine")

    async def serve_snapshots(self, protocol: str, rdma_device: str) -> None:
        await self._call("serve_snapshots", protocol, rdma_device)

    async def reserve(self, part: int, is_flat: bool) -> Offer | None:
        offer: Offer | None = await self._call("reserve", part, is_flat)
        return offer

    async def map(self, part: int, offer: Offer) -> None:
        await self._call("map", part, offer)

    async def snapshot(self, header: SnapshotHeader, is_flat: bool, expected: Digests) -> Offer:
        offer: Offer = await self._call("snapshot", header, is_flat, expected)
        return offer

    async def replicate(self, snapshot_part: SnapshotPart, timeout_s: float) -> Offer:
        replica: Offer = await self._call("replicate", snapshot_part, timeout_s)
        return replica

    async def snapshots(self) -> list[SnapshotPart]:
        parts: list[SnapshotPart] = await self._call("snapshots")
        return parts

    async def refill(
        self, attempt: int, snapshot: Snapshot, direct: bool, timeout_s: float, limit_s: float
    ) -> Refilled:
        refilled: Refilled = await self._call("refill", attempt, snapshot, direct, timeout_s, limit_s)
        return refilled

    async def stop_refill(self, cause: str) -> None:
        await self._call("stop_refill", cause)

    async def sample_memory(self, on: bool) -> tuple[str, Samples]:
        seen: tuple[str, Samples] = await self._call("sample_memory", on)
        return seen

    async def watch(self) -> None:
        await self._call("watch")
