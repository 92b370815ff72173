"""Trainers and multi-rank engines on several hosts in one process, with real holders.

Holders talk over gloo. Memory of this process stands for what they map through CUDA IPC, and HostCopies stand
for kernels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from tests.unit.plan.plan_strategies import NUMPY, PAD, Rank, cuts, decoder, engine_rank, hold, values
from weightsync.channel.feed import EngineFeed
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.holder import Holder
from weightsync.holder.staging import HostStaging
from weightsync.holder.trainer_parts import digest_parts, parts_in_place
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.bucket_copies import bucket_rows
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.kernels.host_copies import AddressCopies
from weightsync.plan import Box, Plan, RankLayout, Reads, TensorMeta
from weightsync.plan.broadcast.plan import by_tensor
from weightsync.protocol.device_memory import DeviceMemory, Export
from weightsync.protocol.handles import BufferHandle, DeviceHandle
from weightsync.protocol.messages import Attached, FeedTicket, Loaded, Published
from weightsync.testing import DictEngine, LocalEngine, LocalPeer, LocalTrainer
from weightsync.transports import Pending

KV_HEADS, EXPERTS = 1, 1
TIED = ("head", "embed")
Memory = dict[str, torch.Tensor]

exported: dict[bytes, torch.Tensor] = {}
"""All memory that ranks have exported, by the `ipc` of its handle."""


def flat(rank: Rank) -> Memory:
    return {name: torch.from_numpy(memory.reshape(-1)) for name, memory in rank.memory.items()}


def export(layout: RankLayout, memory: Memory) -> DeviceMemory:
    handles = {}
    for name, tensor in memory.items():
        ipc = str(tensor.data_ptr()).encode()
        exported[ipc] = tensor
        handles[name] = DeviceHandle(layout.device, 0, ipc, 0, tensor.nbytes)
    return DeviceMemory.of(handles)


def mapped(handles: Mapping[str, DeviceHandle]) -> Memory:
    return {name: exported[handle.ipc] for name, handle in handles.items()}


def starts(memory: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in memory.items()}


class Source:
    """A trainer rank that holds rows and exports them like a GPU's."""

    def __init__(self, tensors: Sequence[TensorMeta], rank: Rank, device: str) -> None:
        """`device` is "" for a rank with weights in host memory, which exports nothing."""
        self.rank, self._dtypes = rank, {meta.name: meta.dtype for meta in tensors}
        self._layout = RankLayout(tuple(tensors), tuple(rank.segments), device=device)
        self._plan: Plan | None = None

    def write(self, weights: Mapping[str, np.ndarray]) -> None:
        for segment in self.rank.segments:
            held = self.rank.view(segment, self._dtypes[segment.tensor])
            held[...] = weights[segment.tensor][segment.box.slices()]

    def layout(self) -> RankLayout:
        return self._layout

    def trial_handle(self) -> DeviceHandle | None:
        if not self._layout.device:
            return None
        return export(self._layout, flat(self.rank)).first()

    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        assert send_buffer
        self._plan, self._send_buffer = plan, SharedBuffer.open(send_buffer)
        self._pieces, self._trainer = plan.trainer_pieces(trainer), trainer
        exported = export(self._layout, flat(self.rank)) if self._layout.device else None
        return Attached(plan.digest(), exported)

    def ready(self) -> bool:
        return not any(piece.nbytes for piece in self._pieces if self._plan and self._plan.slots)

    def publish(self, count: bool) -> Published:
        assert self._plan
        shares = np.zeros(len(self._plan.tensors), np.uint64)
        for piece in self._pieces:
            meta = self._plan.tensors[piece.tensor]
            (segment,) = (
                s for s in self.rank.segments if s.tensor == meta.name and piece.box.intersect(s.box)
            )
            held = np.array(self.rank.view(segment, meta.dtype)[piece.box.slices(segment.box)])
            at = slice(piece.send_buffer_offset, piece.send_buffer_offset + piece.nbytes)
            self._send_buffer.tensor[at] = torch.from_numpy(held.reshape(-1).view(np.uint8))
            share = tensor_digest(torch.from_numpy(held.view(np.int32)), meta.shape, piece.box)
            shares[piece.tensor : piece.tensor + 1] += np.uint64(share)
        if not self._plan.num_pieces:
            parts = parts_in_place(self._plan, self._trainer, self._layout, flat(self.rank))
            shares = digest_parts(self._plan, parts)
        return Published(shares, {})


class Engine(DictEngine):
    """An engine of tensor-parallel ranks. Holders write its memory if it `shares` it."""

    def __init__(self, name: str, tensors: Sequence[TensorMeta], size: int, first: int, shares: bool) -> None:
        super().__init__(name, {})
        self.shares, self._feeds, self._first = shares, list[EngineFeed](), first
        self.ranks = [engine_rank(tensors, size, index, KV_HEADS, EXPERTS) for index in range(size)]
        self._tensors = tensors

    def layout(self) -> Sequence[RankLayout]:
        return [
            RankLayout(
                tuple(self._tensors),
                tuple(rank.segments),
                (TIED,),
                tuple(rank.buffers),
                tuple(rank.padding),
                device=f"cuda:{self._first + index}",
            )
            for index, rank in enumerate(self.ranks)
        ]

    def can_export(self) -> Sequence[bool]:
        return [self.shares] * len(self.ranks)

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        self.close()
        with ThreadPoolExecutor() as threads:
            opened = threads.map(lambda ticket: EngineFeed.open(ticket, plan, timeout_s), tickets)
            self._feeds = list(opened)
        self._live = [self._typed(rank) for rank in self.ranks]
        each = zip(self.layout(), self._live, self._feeds, strict=True)
        self._writers = [LiveWriter(plan, layout, typed, feed.slots) for layout, typed, feed in each]
        pairs = zip(self.layout(), self.ranks, strict=True)
        return [
            Attached(plan.digest(), export(layout, flat(rank)) if self.shares else None)
            for layout, rank in pairs
        ]

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        def rank(number: int) -> Loaded:
            self._writers[number].begin(self._live[number])
            feed = self._feeds[number]
            return Loaded(feed.receive(attempt, self._writers[number], timeout_s), feed.spans)

        with ThreadPoolExecutor() as threads:
            return list(threads.map(rank, range(len(self.ranks))))

    def _typed(self, rank: Rank) -> Memory:
        return {
            meta.name: torch.from_numpy(rank.memory[meta.name][: meta.nbytes])
            .view(getattr(torch, meta.dtype))
            .view(meta.shape)
            for meta in rank.buffers
        }

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()
        self._feeds = []


class Staging(HostStaging):
    """Staging like DeviceStaging, with memory of this process."""

    def __init__(self, plan: Plan, index: int, send_buffer: SharedBuffer | None, receives: bool) -> None:
        super().__init__(plan, index, send_buffer, receives)
        self._plan, self.writes, self._direct_copy = plan, False, None
        self.quantizing = None
        self.mapped, self.source, self.target, self.flat = self, {}, {}, None
        self._targets: list[SharedBuffer] = []

    def connect(self, trainer: Export) -> None:
        self.source = mapped(trainer.memory.handles())

    def forget_engine(self) -> None:
        self.writes, self.target, self.flat, self._direct_copy = False, {}, None, None

    def link(self, engine: Export | None) -> None:
        self.writes, self.target, self._direct_copy = engine is not None, {}, None
        if engine:
            self.target = mapped(engine.memory.handles())
            slots = [slot.tensor for slot in self._slots]
            rows, bounds = bucket_rows(
                self._plan,
                by_tensor(self._plan, engine.layout),
                starts(self.target),
                [slot.data_ptr() for slot in slots],
                into=True,
            )
            self._unpack = AddressCopies(rows, bounds, [*slots, *self.target.values()])
            self.flat = FlatSnapshot(self.target)

    def route(self, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        near = {key: exported[handle.ipc] for key, handle in memory.items()}
        address = {key: tensor.data_ptr() for key, tensor in near.items()}
        (whole,) = reads
        copies = whole.copies(address, starts(self.target))
        self._direct_copy = AddressCopies(copies, (0, len(copies)), [*near.values(), *self.target.values()])

    def start_direct_copy(self, frozen: bool = True) -> None:
        assert self._direct_copy
        self._direct_copy.run(0)

    def fill(self, bucket: int, timeout_s: float) -> Sequence[Pending]:
        for step in self._plan.bucket_steps(bucket) if self._slots else ():
            if step.root == self._index:  # writes to the engine are taken from the slot
                slot = self._slots[bucket % len(self._slots)].tensor
                slot[step.offset : step.offset + step.nbytes] = self.at(step)
        return ()

    def targets(self) -> Sequence[SharedBuffer]:
        while len(self._targets) < 2:
            self._targets.append(SharedBuffer.create(self._plan.target_nbytes))
        return self._targets

    def put(self, bucket: int, timeout_s: float) -> None:
        held = self._targets[bucket % len(self._targets)].tensor
        self._slots[bucket % len(self._slots)].tensor[: len(held)] = held

    def write(self, bucket: int) -> None:
        self._unpack.run(bucket)

    def wait_written(self, timeout_s: float) -> None:
        """Copies on the host have ended when their call returns."""

    def close(self) -> None:
        super().close()
        for target in self._targets:
            target.close()
        self._targets = []


class MappingHolder(Holder):
    """A holder that can map what this process exported."""

    def try_mapping(self, memory: Mapping[str, DeviceHandle]) -> str:
        mapped(memory)
        return ""


class Hosts:
    """A fleet over several hosts.

    `trainers` names the host of each trainer rank, `engines` those of each engine's ranks, one character
    each.
    """

    def __init__(
        self,
        trainers: str,
        engines: Mapping[str, str],
        config: SyncConfig,
        *,
        hidden: int = 60,
        alone: Sequence[str] = (),
        address: str = "127.0.0.1",
        trainers_on: str = "cuda",
        num_shards: int = 0,
    ) -> None:
        """Make the fleet. Trainers hold `num_shards` parts of each tensor; by default each has its own.

        Engines have equal numbers of ranks; those in `alone` do not share memory. Holders are at `address`.
        Trainers have their weights on GPUs, or in host memory if `trainers_on` is "".
        """
        self._address = address
        size, num_shards = max(map(len, engines.values())), num_shards or len(trainers)
        self.tensors = decoder("float32", size, hidden, KV_HEADS, EXPERTS, 41)
        self.sources = []
        for number in range(len(trainers)):
            rank = Rank()
            for meta in self.tensors:
                # Cut by rows, the last shards have fewer or none. The first has the scalars.
                shard = number % num_shards
                start, rows = cuts(meta.shape[0], num_shards)[shard] if meta.shape else (0, 0)
                box = (
                    Box((start, *(0 for _ in meta.shape[1:])), (rows, *meta.shape[1:]))
                    if meta.shape
                    else Box((), ())
                )
                if not meta.shape and shard:
                    continue
                hold(rank, meta, box, np.zeros(meta.shape, NUMPY[meta.dtype]))
            self.sources.append(Source(self.tensors, rank, trainers_on and f"{trainers_on}:{number}"))
        hosts, members, self.engines = list(trainers), {}, {}
        for name, on in engines.items():
            engine = Engine(name, self.tensors, len(on), len(hosts), name not in alone)
            self.engines[name] = engine
            members[name] = EngineMember(LocalEngine(engine), tuple(range(len(hosts), len(hosts) + len(on))))
            hosts += on
        self.holders: list[Holder] = []
        for _ in hosts:
            self._hold()
        self.fleet = Fleet(
            [(LocalTrainer(source), number) for number, source in enumerate(self.sources)],
            members,
            [LocalPeer(holder) for holder in self.holders],
            hosts,
        )
        self.controller = Controller(config, self.fleet)
        self._seed = 0

    def train(self) -> None:
        self._seed += 1
        self.weights = values(self.tensors, self._seed)
        for source in self.sources:
            source.write(self.weights)

    def wrong(self, name: str) -> list[str]:
        """Return an engine's buffers that differ from slices of whole tensors, padding included."""
        found = []
        dtypes = {meta.name: meta.dtype for meta in self.tensors}
        for number, rank in enumerate(self.engines[name].ranks):
            held = {buffer: memory.copy() for buffer, memory in rank.memory.items()}
            for memory in rank.memory.values():
                memory[:] = PAD
            for segment in rank.segments:
                rank.view(segment, dtypes[segment.tensor])[...] = self.weights[segment.tensor][
                    segment.box.slices()
                ]
            found += [f"{number} {b}" for b, memory in rank.memory.items() if (memory != held[b]).any()]
        return found

    async def update(self, version: int) -> Mapping[str, str]:
        """Update to new weights, checked bit for bit. Returns the routes by engine."""
        self.train()
        report = await self.controller.update(version)
        assert report.verified
        assert report.engines == dict.fromkeys(self.engines, version)
        assert {name: self.wrong(name) for name in self.engines} == {name: [] for name in self.engines}
        return report.routes

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(meta.nbytes for meta in self.tensors)

    def needed(self, name: str) -> list[int]:
        """Return each engine rank's bytes; bytes taken twice count twice."""
        itemsize = {meta.name: meta.itemsize for meta in self.tensors}
        ranks = self.engines[name].ranks
        return [sum(s.box.numel * itemsize[s.tensor] for s in rank.segments) for rank in ranks]

    def crossed(self) -> int:
        """Return the bytes that one update sends between hosts."""
        return sum(link.nbytes for link in self.controller.links() if link.distance == "other host")

    def respawn(self, name: str, on: str = "", holders: tuple[int, ...] = ()) -> None:
        """Replace engine `name`, on its holders, `holders`, or new ones on hosts `on`."""
        old, holders = self.engines[name], holders or self.fleet.engines[name].holders
        old.close()
        if on:
            holders = tuple(range(len(self.holders), len(self.holders) + len(on)))
            self.fleet.nodes += on
            self.fleet.holders += [LocalPeer(self._hold()) for _ in on]
        self.engines[name] = Engine(name, self.tensors, len(holders), holders[0], old.shares)
        self.fleet.engines[name] = EngineMember(LocalEngine(self.engines[name]), holders)

    def _hold(self) -> Holder:
        holder = MappingHolder(f"holder {len(self.holders)}", self._address, make_staging=Staging)
        self.holders.append(holder)
        return holder

    def close(self) -> None:
        for part in (*self.engines.values(), *self.holders):
            part.close()
        exported.clear()


def drive(work: Callable[[Hosts], Coroutine[object, object, None]], *args: object, **more: object) -> None:
    """Run `work` on the fleet that the other arguments describe."""

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))
        await work(fleet)

    fleet = Hosts(*args, **more)  # type: ignore[arg-type]
    try:
        asyncio.run(run())
    finally:
        fleet.close()
