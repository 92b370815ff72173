"""A fleet of peers that answer at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import cast

import numpy as np

from benchmarks.bench_plan import tensors
from benchmarks.driver_ledger import Ledger, Message, Reply, Wire
from weightsync.actors.ray.publish_notices import HolderNode
from weightsync.actors.ray.publish_relay import relayed_ranks
from weightsync.config import Components, PrefixCache
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.errors import WeightSyncError
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.node.calls import methods_of
from weightsync.plan import Box, Plan, RankLayout, Segment, TensorMeta, broadcast_groups
from weightsync.plan.cross_host.cross_host import BundleTable, CrossHostTerms
from weightsync.plan.direct.alike import Alike, LocalReads
from weightsync.plan.layout.layout_table import LayoutTable, Outline
from weightsync.plan.layout.segment import MeshPlace
from weightsync.protocol.device_memory import DeviceMemory, RankMemory
from weightsync.protocol.handles import BufferHandle, DeviceHandle, Offer
from weightsync.protocol.messages import (
    Attached,
    Digests,
    Exchange,
    FeedTicket,
    Group,
    LoadReport,
    Moved,
    Prepared,
    PublishReport,
    PublishTask,
    SnapshotHeader,
    SnapshotPart,
    UpdateTask,
)
from weightsync.protocol.peers import EnginePeer, HolderPeer, TrainerPeer
from weightsync.protocol.timing import Span

__all__ = ["TENSOR_PARALLEL", "Model", "make_fleet"]

TENSOR_PARALLEL, PER_HOST = 8, 8
_IPC_NBYTES = 64
_PROCESS = 4242
_BLOCKS = ((1 << 20, 2 << 20), (10 << 20, 20 << 20))
"""Pairs of a tensor's largest bytes and the bytes of a shared block, as in torch's allocator."""
_NO_HOLDER = 1 << 31


class TrainerWire(Wire):
    """A trainer rank that is readable at once. The notice, 20 bytes on a socket, is not counted."""

    def ask_readable(self, readable: asyncio.Future[None]) -> None:
        """Return None: `publish` tells that the rank is readable."""

    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
        readable.set_result(None)
        report: PublishReport = await self.call("publish", task)
        return report


class RelayWire(Wire):
    """A holder that asks the host's trainer ranks, which are readable at once."""

    def __init__(self, peer: object, ledger: Ledger, host: str, ranks: Sequence[int]) -> None:
        super().__init__(peer, ledger, host, HolderNode)
        self.name, self.ranks = f"trainers on {host}", ranks

    async def publish(
        self, task: PublishTask, readable: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> Sequence[PublishReport | WeightSyncError]:
        for each in readable:
            each.set_result(None)
        tickets = (1,) * len(readable)
        reports, _ = await self.call("publish_all", task, tickets, timeout_s)
        return [reports[rank] for rank in self.ranks]


class Model:
    """Tensors of `bench_plan`, with the digests that both sides report.

    Attributes:
        metas: the tensors.
        share: a trainer rank's digests; equal on all ranks.
        held: an engine's digests, by rank.
        report: a trainer rank's answer to `publish`.
        published: the same answer, pickled.
        loaded: an engine's answer to `load`, with fingerprints that equal the trainers' sum.
    """

    def __init__(self, num_tensors: int, num_trainers: int, num_shards: int) -> None:
        self.metas, self._num_shards = tensors(num_tensors), num_shards
        self._digest: tuple[Plan, str] | None = None
        self._engine_answers: dict[str, Message | Reply] = {}
        self._outline: Outline | None = None
        self._memory: DeviceMemory | None = None
        self._cuts = {meta.name: ((1, 0),) for meta in self.metas}
        self._row_strides = [Box.whole(meta.shape).strides(meta.itemsize) for meta in self.metas]
        share = self.share = np.random.default_rng(1).integers(0, 1 << 63, num_tensors, np.uint64)
        nothing = np.zeros(3, np.uint64)
        self.report = PublishReport(fingerprint(share), nothing, {}, [_span("publish")])
        self.published = Message.of(self.report)
        total: Digests = share * np.uint64(num_trainers)
        self.held = np.repeat(total[None], TENSOR_PARALLEL, axis=0)
        spans = [[_span("load"), _span("verify")]] * TENSOR_PARALLEL
        self.loaded = LoadReport(fingerprint(self.held), spans)

    def plan_digest(self, plan: Plan) -> str:
        """Return the digest of `plan`, computed once for all peers."""
        if self._digest is None or self._digest[0] is not plan:
            self._digest = plan, plan.digest()
        return self._digest[1]

    def outline(self, num_ranks: int) -> Outline:
        """Return the outline of the first trainer rank."""
        self._outline = self._outline or LayoutTable.of(self.trainer_layout(0, num_ranks)).outline()
        return self._outline

    def place(self, rank: int) -> tuple[int, int]:
        """Return a trainer rank's replica and shard."""
        return divmod(rank, self._num_shards)

    @cached_property
    def engine_outlines(self) -> Sequence[Outline]:
        """The outlines of an engine's ranks."""
        return [LayoutTable.of(each).outline() for each in self.engine_layouts(_NO_HOLDER)]

    def trainer_layout(self, rank: int, num_ranks: int) -> RankLayout:
        """Return rows of all tensors, cut as by FSDP2: the last shards have fewer rows or none."""
        replica, shard = self.place(rank)
        boxes = (_part(meta, 0, shard, self._num_shards) for meta in self.metas)
        segments = tuple(
            Segment(meta.name, box, meta.name, 0, strides)
            for meta, box, strides in zip(self.metas, boxes, self._row_strides, strict=True)
        )
        place = MeshPlace((num_ranks // self._num_shards, self._num_shards), (replica, shard), self._cuts)
        return RankLayout(self.metas, segments, device=_device(rank), mesh=place)

    def trainer_memory(self, rank: int, num_ranks: int) -> DeviceMemory:
        """Return handles of a trainer rank's memory: the first rank's, in other allocations."""
        if self._memory is None:
            self._memory = _memory(self.trainer_layout(0, num_ranks))
        ipc = np.random.default_rng(rank).bytes(len(self._memory.ipc))
        return replace(self._memory, owners=((_device(rank), _PROCESS),), ipc=ipc)

    def engine_layouts(self, first: int) -> list[RankLayout]:
        """Return rows, columns of down projections, or whole tensors, each a live parameter."""
        return [self._engine_layout(rank, _device(first + rank)) for rank in range(TENSOR_PARALLEL)]

    def _engine_layout(self, rank: int, device: str) -> RankLayout:
        boxes = [_part(meta, _cut(meta), rank, TENSOR_PARALLEL) for meta in self.metas]
        pairs = [*zip(self.metas, boxes, strict=True)]
        segments = [Segment(meta.name, box, meta.name, 0, box.strides(meta.itemsize)) for meta, box in pairs]
        buffers = tuple(TensorMeta(meta.name, meta.dtype, box.extent) for meta, box in pairs)
        return RankLayout(self.metas, tuple(segments), buffers=buffers, device=device)

    def engine_answer(self, first: int, digest: str) -> Message | Reply:
        """Return an engine's layouts, packed, or its answer to `attach` if `digest` is a plan's.

        Engines differ only in the names of their devices, which are equally long. One answer is packed, and
        each engine's names are put into it.
        """
        if digest not in self._engine_answers:
            layouts = self.engine_layouts(_NO_HOLDER)
            self._engine_answers[digest] = (
                Message.of([Attached(digest, _memory(each)) for each in layouts])
                if digest
                else Reply.of(methods_of(EnginePeer)["layout"], [LayoutTable.of(each) for each in layouts])
            )
        message = self._engine_answers[digest]
        body = message.body
        for rank in range(TENSOR_PARALLEL):
            body = body.replace(_device(_NO_HOLDER + rank).encode(), _device(first + rank).encode())
        return replace(message, body=body)


class TrainerRank:
    """An FSDP rank on a GPU, read in place."""

    def __init__(self, model: Model, rank: int, num_ranks: int) -> None:
        self._model, self._rank, self._num_ranks = model, rank, num_ranks

    def outline(self) -> Outline:
        outline, device = self._model.outline(self._num_ranks), _device(self._rank)
        return replace(outline, device=device, mesh=self._model.place(self._rank))

    def layout(self) -> LayoutTable:
        return LayoutTable.of(self._layout())

    def _layout(self) -> RankLayout:
        return self._model.trainer_layout(self._rank, self._num_ranks)

    def trial_handle(self) -> DeviceHandle:
        return _handle(_device(self._rank), 0, 4096)

    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        memory = self._model.trainer_memory(self._rank, self._num_ranks)
        return Attached(self._model.plan_digest(plan), memory)

    def publish(self, task: PublishTask) -> Message:
        return self._model.published

    def digests(self) -> Digests:
        return self._model.share


class Relay:
    """A holder's calls of the host's trainer ranks."""

    def __init__(self, model: Model, ranks: Sequence[int]) -> None:
        self._model, self._ranks = model, ranks

    def publish_all(
        self, task: PublishTask, tickets: Sequence[int], timeout_s: float
    ) -> tuple[Mapping[int, PublishReport], Mapping[int, object]]:
        return dict.fromkeys(self._ranks, self._model.report), {}


class EngineRanks:
    """An engine of tensor-parallel ranks on GPUs, whose memory holders write."""

    def __init__(self, model: Model, first: int) -> None:
        self._model, self._first = model, first

    def outline(self, components: Components) -> Sequence[Outline]:
        pairs = enumerate(self._model.engine_outlines)
        return [replace(each, device=_device(self._first + rank)) for rank, each in pairs]

    def layout(self, components: Components) -> Message | Reply:
        return self._model.engine_answer(self._first, "")

    def can_export(self) -> Sequence[bool]:
        return [True] * TENSOR_PARALLEL

    def attach(
        self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float, prefix_cache: PrefixCache
    ) -> Message | Reply:
        return self._model.engine_answer(self._first, self._model.plan_digest(plan))

    def pause(self, mode: str, timeout_s: float) -> None: ...

    def load(self, attempt: int, timeout_s: float) -> LoadReport:
        return self._model.loaded

    def digests(self) -> Digests:
        return self._model.held

    def resume(self, version: int) -> None: ...


class Holder:
    """A holder on a GPU, in a communicator of all holders."""

    def __init__(self, model: Model, index: int) -> None:
        self._model, self._index, self._name = model, index, f"holder {index}"

    def try_mapping(self, memory: Mapping[str, DeviceHandle]) -> str:
        return ""

    def prepare(self, plan: Plan, index: int, source: str) -> Prepared:
        groups = broadcast_groups(plan.members, together=True) if plan.slots else {}
        offers: dict[Group, str] = {g: "tcp://10.0.0.1:29500" for g in groups.values() if g[0] == index}
        engine = next((name for name, holders in plan.members.engines if index in holders), None)
        slots = tuple(_handle(_device(index), slot, plan.max_bucket_nbytes) for slot in range(plan.slots))
        ticket = (
            FeedTicket(self._name, engine, "ipc:///tmp/feed", bytes(32), slots, None, -1) if engine else None
        )
        return Prepared(self._model.plan_digest(plan), None, ticket, offers)

    def join(self, offers: Mapping[Group, str], timeout_s: float) -> None: ...

    def accept(self, timeout_s: float, engine: DeviceMemory | None = None) -> None: ...

    def warm_up(self, timeout_s: float) -> None: ...

    def link(
        self,
        engine: RankMemory | None,
        trainer: RankMemory | None = None,
        engine_layout: LayoutTable | None = None,
        trainer_layout: LayoutTable | None = None,
    ) -> None: ...

    def route(
        self, reads: LocalReads, memory: Mapping[int, DeviceMemory], alike: Alike | None = None
    ) -> None: ...

    def exchange(
        self, terms: CrossHostTerms, rank: int, sent: Mapping[int, BundleTable], received: BundleTable | None
    ) -> Exchange:
        """Answer as if all possible pairs exchanged messages. The real plan takes seconds."""
        senders, found = range(terms.num_senders), terms.place(rank)
        mates = {*found[0].ranks} - {rank} if found else set[int]()
        far = [host.ranks for host in terms.hosts if rank in senders and rank not in host.near]
        receivers = sorted(mates.union(*far))
        givers = sorted(mates.union(senders) - (found[0].near - mates) - {rank}) if found else []
        return Exchange(
            "" if rank else "tcp://10.0.0.1:29501",
            {other: (rank << 32 | other).to_bytes(16, "little") for other in receivers},
            {other: (other << 32 | rank).to_bytes(16, "little") for other in givers},
        )

    def meet(self, rendezvous: str, timeout_s: float) -> None: ...

    def serve_snapshots(self, protocol: str, rdma_device: str) -> None: ...

    def reserve(self, part: int, is_flat: bool) -> Offer:
        return self._offer()

    def map(self, part: int, offer: Offer) -> None: ...

    def move(self, attempt: int, task: UpdateTask, timeout_s: float) -> Moved:
        return Moved(_span("move"))

    def digests(self) -> Digests:
        """Return the trainer's published digests. The driver only asks if an engine's digests differ."""
        return self._model.share

    def snapshot(self, header: SnapshotHeader, is_flat: bool, expected: Digests, live: None) -> Offer:
        return self._offer()

    def replicate(self, snapshot_part: SnapshotPart, timeout_s: float) -> Offer:
        return self._offer()

    def _offer(self) -> Offer:
        memory = BufferHandle(1000 + self._index, 9, f"{self._name} snapshot", 1 << 30)
        return Offer(
            holder=self._name,
            protocol="zeromq",
            memory=memory,
            endpoint="tcp://10.0.0.1:29502",
            secret="0" * 32,
        )


def make_fleet(
    num_tensors: int,
    num_trainers: int,
    num_engines: int,
    ledger: Ledger,
    *,
    colocated: bool = False,
    num_shards: int = 0,
) -> Fleet:
    """Return a fleet on hosts of 8 GPUs, with a holder per GPU. `ledger` records every call.

    Trainers and engines share GPUs if `colocated`, otherwise they are on separate hosts. Trainers hold
    replicas of `num_shards` parts of each tensor; by default every trainer has a different part.
    """
    model = Model(num_tensors, num_trainers, num_shards or num_trainers)
    homes = [(f"trainers {rank // PER_HOST}", rank) for rank in range(num_trainers)]
    engines = {}
    for number in range(num_engines):
        first = number * TENSOR_PARALLEL if colocated else len(homes)
        for rank in range(len(homes), first + TENSOR_PARALLEL):
            homes.append((f"engine {number}", rank))
        peer = cast("EnginePeer", Wire(EngineRanks(model, first), ledger, f"engine {number}", EnginePeer))
        engines[f"e{number:03}"] = EngineMember(peer, tuple(range(first, first + TENSOR_PARALLEL)))
    nodes = [host for host, _ in homes]
    return Fleet(
        trainers=[
            (cast("TrainerPeer", TrainerWire(TrainerRank(model, rank, num_trainers), ledger, host)), rank)
            for host, rank in homes[:num_trainers]
        ],
        engines=engines,
        holders=[
            cast("HolderPeer", Wire(Holder(model, index), ledger, host, HolderPeer)) for host, index in homes
        ],
        nodes=nodes,
        share=ledger.share,
        relays=[
            RelayWire(Relay(model, ranks), ledger, homes[ranks[0]][0], ranks)
            for ranks in relayed_ranks(nodes[:num_trainers])
        ],
    )


def _cut(meta: TensorMeta) -> int | None:
    """Return the dimension that an engine's ranks cut; None if they have the whole tensor."""
    if ".dense.7." in meta.name:
        return None
    return 1 if ".down_proj." in meta.name else 0


def _part(meta: TensorMeta, axis: int | None, rank: int, num_ranks: int) -> Box:
    if axis is None:
        return Box.whole(meta.shape)
    offset, extent = [0] * len(meta.shape), list(meta.shape)
    size = -(-meta.shape[axis] // num_ranks)
    offset[axis] = start = min(rank * size, meta.shape[axis])
    extent[axis] = min(size, meta.shape[axis] - start)
    return Box(tuple(offset), tuple(extent))


def _memory(layout: RankLayout) -> DeviceMemory:
    """Return handles of a layout's buffers, in blocks as torch's allocator fills them."""
    itemsize = {meta.name: meta.itemsize for meta in layout.tensors}
    handles, num_blocks = {}, 0
    open_blocks: dict[int, tuple[int, int]] = {}  # number and bytes in use, by size
    for each in layout.segments:
        nbytes = each.box.numel * itemsize[each.tensor]
        if nbytes:
            size = next((size for most, size in _BLOCKS if nbytes <= most), nbytes)
            number, used = open_blocks.get(size, (num_blocks, 0))
            if used + nbytes > size:
                number, used = num_blocks, 0
            num_blocks = max(num_blocks, number + 1)
            open_blocks[size] = number, used + -(-nbytes // 512) * 512
            handles[each.buffer] = _handle(layout.device, number, nbytes, used)
    return DeviceMemory.of(handles)


def _handle(device: str, number: int, nbytes: int, offset: int = 0) -> DeviceHandle:
    ipc = np.random.default_rng(number).bytes(_IPC_NBYTES)  # as little alike as CUDA's
    return DeviceHandle(device, _PROCESS, ipc, offset, nbytes)


def _device(holder: int) -> str:
    return f"cuda:GPU-{holder:08x}-0000-0000-0000-000000000000"


def _span(name: str) -> Span:
    return Span(name, 1.8e9, 0.01)
