"""Awaitable calls from the driver to other processes, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NewType, Protocol

from weightsync.config import Components, PrefixCache
from weightsync.errors import WeightSyncError
from weightsync.plan.cross_host.cross_host import BundleTable
from weightsync.plan.direct.alike import LocalReads
from weightsync.plan.layout.layout_table import LayoutTable, Outline
from weightsync.protocol.device_memory import DeviceMemory, LiveMemory, RankMemory
from weightsync.protocol.handles import BufferHandle, DeviceHandle, HostExport, Offer
from weightsync.protocol.messages import (
    Attached,
    Digests,
    Exchange,
    FeedTicket,
    Fingerprint,
    Group,
    LiveDigest,
    LoadReport,
    Moved,
    Prepared,
    PublishReport,
    PublishTask,
    Refilled,
    Samples,
    Snapshot,
    SnapshotHeader,
    SnapshotPart,
    StagedPart,
    StageTask,
    StagingMemory,
    UpdateTask,
)

SharedPlan = NewType("SharedPlan", object)
"""A plan as calls of many peers carry it, made by `Fleet.share`.

It is the plan itself or, under Ray, a reference to the store, which copies it to each host once. The called
process always receives the plan.
"""

SharedTerms = NewType("SharedTerms", object)
"""`CrossHostTerms` as calls of many peers carry them, made by `Fleet.share`, as `SharedPlan`."""

SharedTable = NewType("SharedTable", object)
"""The same of a `BundleTable`: engine ranks with equal needs receive the same."""

SharedAlike = NewType("SharedAlike", object)
"""The same of `Alike`: engines of equal layout have the same."""

SharedLayout = NewType("SharedLayout", object)
"""The same of a `LayoutTable`. Holders make the layouts of all ranks of a mesh of it."""


class TrainerPeer(Protocol):
    """A trainer rank, as the driver calls it. `weightsync.sources.Source` documents the methods.

    Layouts and handles are sent in columns, see `LayoutTable` and `DeviceMemory`. `outline` describes the
    rank. `layout`, which is asked of one of the ranks with equal outlines, returns the described layout.

    `digests` returns the last published digests, uint64[num_tensors]. `replica_digests` returns the last
    compared digests of boxes that other ranks hold, too: see `Compared`.

    `trial_handle` is the method of `weightsync.sources.ExportsWeights`, and returns None for other sources.
    For exporting sources, `publish` calls `ready` first, and resolves `readable` if holders may read the
    weights from then on.

    `ask_readable` asks, before `publish` is called with the same `readable`, whether holders may read, and
    resolves it if they may. It returns the future answer, None for a rank that cannot be asked.
    """

    async def outline(self) -> Outline: ...
    async def layout(self) -> LayoutTable: ...
    async def trial_handle(self) -> DeviceHandle | None: ...
    async def attach(self, plan: SharedPlan, trainer: int, send_buffer: BufferHandle | None) -> Attached: ...
    def ask_readable(self, readable: asyncio.Future[None]) -> asyncio.Future[bool] | None: ...
    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport: ...
    async def digests(self) -> Digests: ...
    async def replica_digests(self) -> Digests: ...


class RelayPeer(Protocol):
    """Another process that asks the trainer ranks of a host, `ranks`, for the driver.

    `publish` calls `publish` of each rank, with the rank's `readable`. It returns each rank's report or
    error, within `timeout_s` seconds: a DeadlineError for a rank that has not answered by then. If the other
    process itself cannot answer, it raises that error, which says nothing about the ranks.
    """

    name: str
    ranks: Sequence[int]

    async def publish(
        self, task: PublishTask, readable: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> Sequence[PublishReport | WeightSyncError]: ...


class HolderPeer(Protocol):
    """A holder, as the driver calls it. `weightsync.holder.holder.Holder` documents the methods.

    `name` is the holder's own, which has another number if the fleet was connected again without others.
    """

    name: str

    async def try_mapping(self, memory: Mapping[str, DeviceHandle]) -> str: ...
    async def prepare(self, plan: SharedPlan, index: int, source: str) -> Prepared: ...
    async def source(self, name: str, exports: Mapping[str, HostExport | None]) -> None: ...
    async def join(self, offers: Mapping[Group, str], timeout_s: float) -> None: ...
    async def accept(self, timeout_s: float, engine: DeviceMemory | None = None) -> None: ...
    async def warm_up(self, timeout_s: float) -> None: ...
    async def route(
        self, reads: LocalReads, memory: Mapping[int, DeviceMemory], alike: SharedAlike | None = None
    ) -> None: ...
    async def exchange(
        self, terms: SharedTerms, rank: int, sent: Mapping[int, BundleTable], received: SharedTable | None
    ) -> Exchange: ...
    async def meet(self, rendezvous: str, timeout_s: float) -> None: ...
    async def move(self, attempt: int, task: UpdateTask, timeout_s: float) -> Moved: ...
    async def digests(self) -> Digests: ...
    async def abort(self, cause: str) -> None: ...
    async def adopt(self, plan: SharedPlan, engine: str) -> FeedTicket: ...
    async def link(
        self,
        engine: RankMemory | LiveMemory | None,
        trainer: RankMemory | None = None,
        engine_layout: SharedLayout | None = None,
        trainer_layout: SharedLayout | None = None,
    ) -> None: ...
    async def drop_engine(self) -> None: ...
    async def serve_snapshots(self, protocol: str, rdma_device: str) -> None: ...
    async def reserve(self, part: int, is_flat: bool) -> Offer | None: ...
    async def map(self, offers: Mapping[int, Sequence[Offer]]) -> None: ...
    async def snapshot(
        self, header: SnapshotHeader, is_flat: bool, expected: Fingerprint, live: LiveDigest | None
    ) -> Offer: ...
    async def replicate(
        self, snapshot_part: SnapshotPart, timeout_s: float, others: Sequence[Offer] = ()
    ) -> Offer: ...
    async def release(self, header: SnapshotHeader) -> None: ...
    async def snapshots(self) -> list[SnapshotPart]: ...
    async def copy_digests(self, header: SnapshotHeader | None) -> Digests | None: ...
    async def reserve_staged(self, parts: Sequence[int], on_device: bool) -> StagingMemory: ...
    async def stage(self, task: StageTask, timeout_s: float) -> Sequence[StagedPart]: ...
    async def keep_staged(self, version: int) -> None: ...
    async def refill(
        self, attempt: int, snapshot: Snapshot, may_map: bool, timeout_s: float, limit_s: float
    ) -> Refilled: ...
    async def stop_refill(self, cause: str) -> None: ...
    async def offer_live(self, header: SnapshotHeader, attempt: int) -> Offer: ...
    async def withdraw_live(self, attempt: int) -> None: ...
    async def sample_memory(self, on: bool) -> tuple[str, Samples]: ...


class EnginePeer(Protocol):
    """An engine, as the driver calls it. `weightsync.engines.Engine` documents the methods.

    Layouts and handles are sent in columns, see `LayoutTable` and `DeviceMemory`. Outlines describe these
    layouts. Both are for an engine that treats components as `SyncConfig.components` says.

    `digests` returns the digests of the last load, uint64[num_ranks, num_tensors], see `EngineDigests`.

    `served` returns the newest version that the process was told to serve, also if it is paused now.

    `weightsync.engines.MovesExperts` documents `experts`, `move_experts` and `live_digests`. Other engines
    have no experts.
    """

    async def outline(self, components: Components) -> Sequence[Outline]: ...
    async def layout(self, components: Components) -> Sequence[LayoutTable]: ...
    async def can_export(self) -> Sequence[bool]: ...
    async def export(self, components: Components) -> Sequence[DeviceMemory | None]: ...
    async def attach(
        self, plan: SharedPlan, tickets: Sequence[FeedTicket], timeout_s: float, prefix_cache: PrefixCache
    ) -> Sequence[Attached]: ...
    async def pause(self, mode: str, timeout_s: float) -> None: ...
    async def sleep(self, level: int, mode: str, timeout_s: float) -> None: ...
    async def load(self, attempt: int, timeout_s: float) -> LoadReport: ...
    async def digests(self) -> Digests: ...
    async def resume(self, version: int) -> None: ...
    async def experts(self) -> Sequence[Sequence[int]]: ...
    async def move_experts(self, experts: Sequence[Sequence[int]]) -> None: ...
    async def live_digests(self) -> LoadReport: ...
    async def serving(self) -> int: ...
    async def served(self) -> int: ...
