"""What the controller needs of the processes that it drives: awaitable, and free of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from weightsync.driver.engine_state import EngineRecord, EngineState

if TYPE_CHECKING:
    from weightsync.channel.engine_end import FeedTicket
    from weightsync.holder.cross_host import Part
    from weightsync.holder.refill import Kept, Refilled
    from weightsync.holder.snapshots import Label, Share
    from weightsync.memory.device import DeviceHandle
    from weightsync.memory.digests import Digests
    from weightsync.memory.gpu_usage import Samples
    from weightsync.memory.host import BufferHandle
    from weightsync.plan import Plan, RankLayout, Reads
    from weightsync.protocol.handles import Attached, Export, HostExport
    from weightsync.protocol.messages import Group, Moved, Prepared, Way
    from weightsync.protocol.published import Published
    from weightsync.readers import Offer

__all__ = ["EnginePeer", "EngineSeat", "Fleet", "HolderPeer", "TrainerPeer"]


class TrainerPeer(Protocol):
    """A trainer rank, from afar; see `weightsync.sources.Source`."""

    async def layout(self) -> RankLayout: ...
    async def attach(self, plan: Plan, trainer: int, arena: BufferHandle | None) -> Attached: ...
    async def publish(self, count: bool) -> Published: ...


class HolderPeer(Protocol):
    """A holder, from afar; see `weightsync.holder.holder.Holder`."""

    async def prepare(self, plan: Plan, index: int, source: str) -> Prepared: ...
    async def source(self, name: str, exports: Mapping[str, HostExport | None]) -> None: ...
    async def join(self, offers: Mapping[Group, str], timeout_s: float) -> None: ...
    async def accept(self, timeout_s: float) -> None: ...
    async def warm_up(self, timeout_s: float) -> None: ...
    async def route(self, reads: Reads, memory: Mapping[tuple[int, str], DeviceHandle]) -> None: ...
    async def exchange(self, part: Part) -> str: ...
    async def meet(self, rendezvous: str, timeout_s: float) -> None: ...
    async def move(self, attempt: int, feeding: bool, way: Way, timeout_s: float) -> Moved: ...
    async def digests(self) -> Digests: ...
    async def abort(self, cause: str) -> None: ...
    async def adopt(self, plan: Plan, engine: str) -> FeedTicket: ...
    async def link(self, engine: Export | None, trainer: Export | None = None) -> None: ...
    async def drop_engine(self) -> None: ...
    async def lend(self, protocol: str, rdma_device: str) -> None: ...
    async def reserve(self, part: int, is_image: bool) -> Offer | None: ...
    async def map(self, part: int, offer: Offer) -> None: ...
    async def keep(self, label: Label, is_image: bool, expected: Digests) -> Offer: ...
    async def mirror(self, share: Share, timeout_s: float) -> Offer: ...
    async def kept(self) -> list[Share]: ...
    async def refill(
        self, attempt: int, kept: Kept, direct: bool, timeout_s: float, limit_s: float
    ) -> Refilled: ...
    async def stop_refill(self, cause: str) -> None: ...
    async def gauge(self, on: bool) -> tuple[str, Samples]: ...


class EnginePeer(Protocol):
    """An engine, from afar; see `weightsync.engines.Engine`."""

    async def layout(self) -> Sequence[RankLayout]: ...
    async def attach(
        self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float
    ) -> Sequence[Attached]: ...
    async def pause(self, mode: str, timeout_s: float) -> None: ...
    async def sleep(self, level: int, mode: str, timeout_s: float) -> None: ...
    async def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]: ...
    async def resume(self, version: int) -> None: ...
    async def serving(self) -> int: ...


@dataclass(slots=True)
class EngineSeat:
    """An engine, the holders of its ranks in order, and what is known of it.

    `attached`: whether its ranks are connected with their holders.
    """

    peer: EnginePeer
    holders: tuple[int, ...]
    record: EngineRecord = field(default_factory=EngineRecord)
    attached: bool = False


@dataclass(slots=True)
class Fleet:
    """Everybody who takes part. In errors they are ``trainer 0``, ``holder 0`` and ``engine <name>``.

    Attributes:
        trainers: trainer ranks in order, each with the index of its holder.
        engines: by name.
        holders: in order; those behind the plan's `num_holders` came after it was made.
        nodes: the host of each holder, by any name; where it is short, all are on one.
    """

    trainers: list[tuple[TrainerPeer, int]]
    engines: dict[str, EngineSeat]
    holders: list[HolderPeer]
    nodes: list[str] = field(default_factory=list)

    def live(self) -> dict[str, EngineSeat]:
        """Every engine that is not DEAD."""
        return {n: seat for n, seat in self.engines.items() if seat.record.state is not EngineState.DEAD}

    def named_holders(self) -> dict[str, HolderPeer]:
        """Holders by the names that errors give them."""
        return {f"holder {i}": holder for i, holder in enumerate(self.holders)}

    def node(self, holder: int) -> str:
        """The host that a holder is on."""
        return self.nodes[holder] if holder < len(self.nodes) else ""
