"""A fleet with direct updates and without GPUs: numpy copies between fake device buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.fleets.loop import CONFIG, Loop
from weightsync.config import SyncConfig
from weightsync.errors import TransportError
from weightsync.holder.second_copy import SecondCopy
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.holder.trainer_parts import digest_parts, parts_in_place
from weightsync.memory.addresses import local_tensor
from weightsync.memory.tensors import named_tensors
from weightsync.plan import Plan, Reads
from weightsync.plan.broadcast.plan import Portion, by_tensor, needed_portions
from weightsync.protocol.device_memory import DeviceMemory, Export
from weightsync.protocol.handles import BufferHandle, DeviceHandle
from weightsync.protocol.messages import Attached, Digests, FeedTicket, Published
from weightsync.sources.module import ModuleSource
from weightsync.testing import DictEngine, LocalEngine, LocalTrainer
from weightsync.transports import Pending

Memory = Mapping[str, torch.Tensor]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Shared:
    """The live memory of all ranks, by the `ipc` of their handles."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, Bytes] = {}

    def export(self, live: Memory) -> DeviceMemory:
        handles = {}
        for name, tensor in live.items():
            ipc = str(tensor.data_ptr()).encode()
            self._arrays[ipc] = tensor.detach().view(torch.uint8).reshape(-1).numpy()
            handles[name] = DeviceHandle("cuda:fake", 0, ipc, 0, tensor.nbytes)
        return DeviceMemory.of(handles)

    def buffer(self, handle: DeviceHandle) -> torch.Tensor:
        return torch.from_numpy(self._arrays[handle.ipc])

    def copies(
        self, reads: Reads, sources: Mapping[tuple[int, str], DeviceHandle], into: DeviceMemory
    ) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield the target and the source of each copy."""
        buffers = into.handles()
        columns = (reads.trainer.tolist(), reads.src_buffer.tolist(), reads.dst_buffer.tolist())
        for trainer, src_name, dst_name, row in zip(*columns, reads.table().tolist(), strict=True):
            src, dst, rows, nbytes, src_pitch, dst_pitch = row
            source = self._arrays[sources[trainer, reads.src_names[src_name]].ipc]
            target = self._arrays[buffers[reads.dst_names[dst_name]].ipc]
            for i in range(rows):
                at = src + i * src_pitch
                yield target[dst + i * dst_pitch :][:nbytes], source[at : at + nbytes]


class Source(ModuleSource):
    """A source that publishes on the host and exports weights like a GPU's.

    Without pieces nothing is published: it digests what it holds.
    """

    shared: Shared
    in_place = True
    _copied: Published | None = None
    _held: tuple[Plan, int] | None = None

    def ready(self) -> bool:
        """Fill the send buffer, which broadcasts read in place of the model, before digests are asked for."""
        if not self.in_place:
            return False
        self._copied = super().publish(count=True)
        return True

    def publish(self, count: bool) -> Published:
        copied, self._copied = self._copied, None
        published = copied or super().publish(count)
        return replace(published, digests=self._digests(*self._held)) if self._held else published

    def _digests(self, plan: Plan, trainer: int) -> Digests:
        memory = {name: tensor.detach().view(torch.uint8).reshape(-1) for name, tensor in self.live().items()}
        return digest_parts(plan, parts_in_place(plan, trainer, self.layout(), memory))

    def live(self) -> dict[str, torch.Tensor]:
        return {name: local_tensor(tensor) for name, tensor in named_tensors(self.model)[0].items()}

    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        attached = super().attach(plan, trainer, send_buffer)
        if not self.in_place:
            return attached
        self._held = None if plan.num_pieces else (plan, trainer)
        return replace(attached, export=self.shared.export(self.live()))


class Engine(DictEngine):
    """An engine whose memory is written by its holder."""

    shared: Shared
    exported: DeviceMemory
    plan: Plan
    num_written = 0

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        (attached,) = super().attach(plan, tickets, timeout_s)
        self.plan = plan
        self.exported = self.shared.export(self.tensors)
        return [replace(attached, export=self.exported)]

    def export(self) -> Sequence[DeviceMemory | None]:
        return [self.shared.export(self.tensors)]

    def written(self, _: object = None) -> None:
        self.num_written += 1


class Staging(HostStaging):
    """Staging that writes buckets to engines, and runs direct copies in `start_direct_copy`."""

    shared: Shared
    engine: Engine
    written: list[int]
    begun: list[int]
    writes, quantizing = True, None
    flat = None
    target: Mapping[str, torch.Tensor] = {}
    unreachable = False
    made: SecondCopy | None = None
    ahead: Sequence[str] = ()

    @property
    def mapped(self) -> Staging:  # type: ignore[override]
        return self

    def wait_written(self, timeout_s: float) -> None:
        """Copies on the host have ended when their call returns."""

    def connect(self, trainer: Export) -> None:
        self.source = {name: self.shared.buffer(handle) for name, handle in trainer.memory.handles().items()}

    def map_ahead(self, engine: DeviceMemory) -> None:
        self.ahead = [*engine.handles()]

    def link(self, engine: Export | None) -> None:
        self.made = None

    def forget_engine(self) -> None:
        self.made = None

    def second_copy(self) -> SecondCopy | None:
        """As `DeviceStaging.second_copy`, with the doubles of `kernel_doubles`."""
        if self.made is None and hasattr(self, "engine"):
            plan, live = self.engine.plan, self.engine.tensors
            segments = by_tensor(plan, self.engine.layout()[0])
            address = {name: tensor.data_ptr() for name, tensor in live.items()}
            self.made = SecondCopy(plan, segments, address, self.needs)
        return self.made

    def route(self, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        if self.unreachable:
            raise TransportError("no peer access")
        self._copies = [[*self.shared.copies(each, memory, self.engine.exported)] for each in reads]

    def fill(self, bucket: int, timeout_s: float) -> Sequence[Pending]:
        self.begun.append(bucket)
        return super().fill(bucket, timeout_s)

    @property
    def needs(self) -> list[list[Portion]]:
        plan = self.engine.plan
        segments = by_tensor(plan, self.engine.layout()[0])
        return [needed_portions(plan, bucket, segments) for bucket in range(plan.num_buckets)]

    def slot(self, bucket: int) -> torch.Tensor:
        return self._slots[bucket % len(self._slots)].tensor

    def load(
        self, bucket: int, parts: Sequence[tuple[int, torch.Tensor]], timeout_s: float
    ) -> Sequence[Pending]:
        for offset, held in parts:
            self.slot(bucket)[offset : offset + len(held)] = held
        return ()

    def start_direct_copy(self, frozen: bool = True) -> None:
        for copies in self._copies if frozen else self._copies[:1]:
            for target, source in copies:
                target[:] = source

    def write(self, bucket: int) -> None:
        self.written.append(bucket)
        plan = self.engine.plan
        slot = self._slots[bucket % len(self._slots)].tensor
        for piece in plan.bucket(bucket).pieces:
            meta = plan.tensors[piece.tensor]
            data = slot[piece.offset : piece.offset + piece.nbytes].view(getattr(torch, meta.dtype))
            self.engine.tensors[meta.name][piece.box.slices()].copy_(data.view(piece.box.extent))


class Direct(Loop):
    """A fleet whose holders read the trainer's memory and write that of two engines."""

    source_type: type[Source] = Source

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.unreachable, self.on_host, self.begun = set[int](), set[int](), list[int]()
        shared = Shared()
        self.source = self.source_type(self.model, frozen=self.frozen)
        self.source.shared, self.source.in_place = shared, config.stage == "none"
        self.fleet.trainers[0] = (LocalTrainer(self.source), 0)
        for name, plain in self.engines.items():
            engine = Engine(name, plain.tensors)
            engine.shared, self.engines[name] = shared, engine
            self.fleet.engines[name].peer = LocalEngine(engine)

    def stage(
        self, holder: int, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool
    ) -> HostStaging:
        if holder in self.on_host:
            return super().stage(holder, plan, index, send_buffer, receives)
        made = Staging(plan, index, send_buffer, receives)
        made.written, made.begun, made.shared = [], self.begun, self.source.shared
        made.unreachable = holder in self.unreachable
        if holder:
            made.engine = [*self.engines.values()][holder - 1]
        return made

    def cut_off(self, holder: int) -> None:
        """Make a holder unable to map the trainers' memory."""
        self.unreachable.add(holder)

    def cannot_write(self, holder: int) -> None:
        """Make a holder unable to write its engine's memory."""
        self.on_host.add(holder)

    def broadcasts(self) -> list[int]:
        """Return a list to which all buckets broadcast from now on are added."""
        self.begun.clear()
        return self.begun


def drive(
    work: Callable[[Direct], Coroutine[object, object, None]],
    config: SyncConfig = CONFIG,
    cls: type[Direct] = Direct,
) -> None:
    loop = cls(config)
    try:
        asyncio.run(work(loop))
    finally:
        loop.close()
