"""Bucket slots on a device, and the kernels that fill and empty them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from weightsync.errors import ConfigError, DeadlineError, TransportError
from weightsync.holder.direct_copy import DirectCopy
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.packed_pieces import PackedPieces
from weightsync.holder.quantised_rank import QuantisedRank
from weightsync.holder.quantizing_copy import QuantizingCopy
from weightsync.holder.second_copy import SecondCopy
from weightsync.holder.send_buffer import MappedSendBuffer, SendBuffer
from weightsync.memory import cuda
from weightsync.memory.device import DeviceBuffer, MappedTensors
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.bucket_copies import bucket_rows
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.memory.tensors import device_id
from weightsync.plan import Plan, Reads, Segment, Step
from weightsync.plan.broadcast.plan import Portion, by_tensor, needed_portions
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory, Export, LiveExport
from weightsync.protocol.handles import DeviceHandle, Handle
from weightsync.quantising.quantizing_tables import QuantizingTables
from weightsync.transports import Pending

logger = logging.getLogger("weightsync.holder")

_NUM_BLOCKS = 64
"""Thread blocks of a copy: close to full speed, and NCCL still finds free multiprocessors."""
_MIN_TARGETS = 2
"""A refill reads into one target while the other is copied to the device."""


def check_device(device: str) -> None:
    """Raise ConfigError unless `device` is the first GPU that this process sees."""
    if (found := device_id(torch.device("cuda", 0))) != device:
        raise ConfigError("device", device, f"the first that this process sees is {found}")


def take_slots(
    plan: Plan, before: Sequence[DeviceBuffer]
) -> tuple[Sequence[DeviceBuffer], Sequence[DeviceBuffer]]:
    """Return the slots that `plan` needs, and the slots of `before` to close.

    Slots of an earlier epoch are kept if they are large enough, so that no process has to map them again.
    Raises TransportError when the device is short of memory.
    """
    if len(before) == plan.slots and all(slot.handle.nbytes >= plan.max_bucket_nbytes for slot in before):
        return before, ()
    slots: list[DeviceBuffer] = []
    torch.cuda.empty_cache()  # torch caches the memory of an earlier epoch's messages
    try:
        while len(slots) < plan.slots:
            slots.append(DeviceBuffer.create(plan.max_bucket_nbytes))
    except TransportError as error:
        for slot in slots:
            slot.close()
        raise TransportError(f"{error}, or lower sync.bucket_bytes") from error
    return slots, before


class DeviceStaging:
    """Bucket slots on this process's GPU. They are filled from the send buffer or the trainer's memory.

    Attributes:
        source: the trainer's buffers, if they are read in place: uint8, one dimension.
        target: the engine rank's buffers, if the holder writes them: uint8, one dimension.
        flat: the engine rank's memory as a flat snapshot. None if the holder has not mapped it.
        quantizing: quantises buckets into the engine rank's memory, if the holder can.
        needs: the portions of each bucket that the engine rank needs, if the holder writes the rank's memory.
    """

    device = "cuda"

    def __init__(
        self, plan: Plan, index: int, send_buffer: SendBuffer | None, slots: Sequence[DeviceBuffer]
    ) -> None:
        self._plan, self._index, self._send_buffer = plan, index, send_buffer
        self._filling, self._writing = _stream(), _stream()
        self._buffers = slots
        self._free: dict[int, torch.cuda.Event] = {}
        self._trainer: MappedTensors | None = None
        self._pack: PackedPieces | None = None
        self._unpack: CopyTable | None = None
        self._quantised: QuantisedRank | None = None
        self.quantizing: QuantizingTables | None = None
        self._engine: MappedTensors | None = None
        self._ahead: MappedTensors | None = None
        self._forgotten: list[_Closes] = []
        self.source: Mapping[str, torch.Tensor] = {}
        self.target: Mapping[str, torch.Tensor] = {}
        self._direct_copy: DirectCopy | QuantizingCopy | None = None
        self.flat: FlatSnapshot | None = None
        self.needs: Sequence[Sequence[Portion]] = ()
        self._export: Export | None = None
        self._held: Sequence[Sequence[Segment]] | None = None
        self._second_copy: SecondCopy | None = None
        self._targets: list[SharedBuffer] = []

    @property
    def slots(self) -> tuple[Handle, ...]:
        return tuple(buffer.handle for buffer in self._buffers)

    @property
    def mapped(self) -> DeviceStaging:
        """The mapped memory, whose copies wait for copies of the slots: this object."""
        return self

    @property
    def writes(self) -> bool:
        """Return True if the holder writes the engine rank's memory. The rank then reads no slots."""
        return self._unpack is not None

    @collector_paused
    def connect(self, trainer: Export) -> None:
        """Map the trainer's memory, from which `fill` then reads. Raises TransportError."""
        self.source = memory = self._trainer = MappedTensors(trainer.memory)
        slots = [buffer.tensor for buffer in self._buffers]
        self._pack = PackedPieces(self._plan, self._index, slots, memory, trainer.layout, _NUM_BLOCKS)

    @collector_paused
    def map_ahead(self, engine: DeviceMemory) -> None:
        """Start to map the engine rank's coming exports. Raises TransportError as `MappedTensors`."""
        self._ahead = MappedTensors(engine)
        self._ahead.map_ahead()

    @collector_paused
    def link(self, engine: Export | LiveExport | None) -> None:
        """Use the engine rank's memory in place of the previous rank's, which is unmapped.

        A mapping of the same memory by `map_ahead` is used. Else it is mapped at once if buckets are written
        to it, or when it is used. Raises TransportError if that fails.
        """
        ahead, self._ahead = self._ahead, None
        _close_all(self._taken_from_engine())
        if ahead and not (engine and engine.memory == ahead.memory):
            ahead.close()
            ahead = None
        if engine is None:
            return
        self._engine = memory = ahead or MappedTensors(engine.memory)
        self.flat = FlatSnapshot(memory)
        if isinstance(engine, LiveExport):
            if engine.places and self._buffers:
                slots = [buffer.tensor for buffer in self._buffers]
                self._quantised = QuantisedRank(self._plan, self._index, slots, engine.places, memory)
                self.quantizing = self._quantised.tables
            return
        self.target, self._export = memory, engine
        starts = [buffer.tensor.data_ptr() for buffer in self._buffers]
        segments = self._segments if starts else ()  # else a refill needs none
        address = memory.addresses() if starts else {}
        rows = bucket_rows(self._plan, segments, address, starts, into=True)
        self._unpack = CopyTable(*rows, _NUM_BLOCKS)
        buckets = range(self._plan.num_buckets if starts else 0)
        self.needs = [needed_portions(self._plan, bucket, segments) for bucket in buckets]

    @collector_paused
    def second_copy(self) -> SecondCopy | None:
        """Return memory for another version of the engine rank's weights, allocated by the first call.

        There is none if the holder does not write them. Raises TransportError when the device is short of it.
        """
        if self._second_copy is None and self.writes and self._engine:
            self._second_copy = SecondCopy(self._plan, self._segments, self._engine.addresses(), self.needs)
        return self._second_copy

    @collector_paused
    def route(self, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        """Map `memory`, trainers' buffers by rank and name, for direct copies. Raises TransportError.

        `reads` has the reads of changing tensors and, if these are separate, the reads of frozen tensors.
        """
        if self._direct_copy:
            self._direct_copy.close()
            self._direct_copy = None
        if not any(map(len, reads)):
            return
        if not self.target:
            if self._quantised is None:
                raise TransportError(f"holder {self._index} cannot quantise what it would read")
            self._direct_copy = self._quantised.copy(reads, memory)
        elif self._engine:
            self._direct_copy = DirectCopy(
                self._plan, self._segments, reads, memory, self._engine.addresses()
            )

    def start_direct_copy(self, frozen: bool = True) -> DirectCopy | QuantizingCopy | None:
        """Start the direct copies into the engine rank's memory, with or without frozen tensors.

        Returns the digests of all tensors that the rank then has, complete after `wait_written`. Returns None
        if the digests do not follow from these copies.
        """
        return self._direct_copy.begin(self._writing, frozen) if self._direct_copy else None

    @contextmanager
    def queue(self) -> Iterator[None]:
        with torch.cuda.stream(self._filling):
            yield

    def fill(self, bucket: int, timeout_s: float) -> Sequence[Pending]:
        stream = self._filling
        if free := self._free.get(bucket % len(self._buffers)):
            stream.wait_event(free)
        if self._pack:
            self._pack.fill(bucket, stream)
        elif isinstance(self._send_buffer, MappedSendBuffer):
            self._send_buffer.fill(bucket, self.slot(bucket))
        elif self._send_buffer is not None:
            data = self._send_buffer.tensor
            own = [step for step in self._plan.bucket_steps(bucket) if step.root == self._index]
            starts = [(step, step.send_buffer_offset) for step in own]
            _load(self.slot(bucket), [(step.offset, data[at : at + step.nbytes]) for step, at in starts])
        return [self.mark(f"filling of bucket {bucket}", timeout_s)]

    def load(
        self, bucket: int, parts: Sequence[tuple[int, torch.Tensor]], timeout_s: float
    ) -> Sequence[Pending]:
        """Start copying `parts`, uint8[n] on the host with their offsets, to a bucket's slot."""
        if free := self._free.get(bucket % len(self._buffers)):
            self._filling.wait_event(free)
        _load(self.slot(bucket), parts)
        return [self.mark(f"filling of bucket {bucket}", timeout_s)]

    def mark(self, what: str, timeout_s: float) -> Pending:
        return _Event(self._filling.record_event(), what, self._index, timeout_s)

    def targets(self) -> Sequence[SharedBuffer]:
        while len(self._targets) < max(len(self._buffers), _MIN_TARGETS):
            self._targets.append(SharedBuffer.create(self._plan.target_nbytes))
        return self._targets

    def put(self, bucket: int, timeout_s: float) -> None:
        if free := self._free.get(bucket % len(self._buffers)):
            self._filling.wait_event(free)
        held = self._targets[bucket % len(self._targets)].tensor
        self.slot(bucket)[: len(held)].copy_(held, non_blocking=True)
        self.mark(f"filling of bucket {bucket}", timeout_s).wait()

    def write(self, bucket: int) -> None:
        """Start writing a bucket from its slot to the engine rank. A later `fill` waits for it.

        If the holder quantises, buckets must be written in order.
        """
        if self.quantizing:
            self.quantizing.run(bucket, self._writing)
        else:
            assert self._unpack is not None
            self._unpack.launch(bucket, self._writing)
        self._free[bucket % len(self._buffers)] = self._writing.record_event()

    def wait_written(self, timeout_s: float) -> None:
        """Wait until everything that was started is written. Raises DeadlineError."""
        self._writing.wait_event(self._filling.record_event())  # flat snapshots are loaded there
        _Event(self._writing.record_event(), "writing to the engine", self._index, timeout_s).wait()

    def at(self, step: Step) -> torch.Tensor:
        return self.slot(step.bucket)[step.offset : step.offset + step.nbytes]

    def close(self) -> None:
        """Unmap the memory of other processes. The slots belong to the holder and outlive an epoch."""
        torch.cuda.synchronize()
        self._pack = None
        _close_all(self._taken_from_engine())
        if self._trainer:
            self._trainer.close()
        _close_all(self._forgotten)
        self.source, self._trainer, self._forgotten = {}, None, []
        for target in self._targets:
            target.close()
        self._targets = []

    @property
    def _segments(self) -> Sequence[Sequence[Segment]]:
        """The engine rank's segments for each tensor of the plan, if the holder writes them."""
        if self._held is None:
            self._held = by_tensor(self._plan, self._export.layout) if self._export else ()
        return self._held

    def forget_engine(self) -> None:
        """Use the engine rank's memory no more, which stays mapped until `unmap_forgotten`."""
        self._forgotten += self._taken_from_engine()

    def unmap_forgotten(self) -> None:
        """Start to unmap forgotten memory on another thread: unmapping can take tenths of a second.

        Mapping in this process waits for the same lock.
        """
        if forgotten := self._forgotten:
            self._forgotten = []
            on_daemon(partial(_close_all, forgotten), "weightsync-unmap")

    def _taken_from_engine(self) -> Sequence[_Closes]:
        """Stop using the engine rank's memory. Returns the mappings to close."""
        mapped: list[_Closes] = [each for each in (self._engine, self._ahead, self._direct_copy) if each]
        self._engine = self._ahead = self._direct_copy = None
        if self._second_copy:
            self._second_copy.close()
            self._second_copy = None
        self._unpack, self.flat, self.target = None, None, {}
        self._export = self._held = None
        self._quantised = self.quantizing = None
        return mapped

    def slot(self, bucket: int) -> torch.Tensor:
        """Return the slot of a bucket: uint8, one dimension."""
        return self._buffers[bucket % len(self._buffers)].tensor


def _load(slot: torch.Tensor, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
    start, stream = slot.data_ptr(), torch.cuda.current_stream()
    for offset, held in parts:
        cuda.copy(start + offset, held.data_ptr(), len(held), stream)


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class _Event:
    """The end of the work queued on a stream so far."""

    def __init__(self, event: torch.cuda.Event, phase: str, holder: int, timeout_s: float) -> None:
        self._event, self._phase, self._timeout_s = event, phase, timeout_s
        self._name = f"the device of holder {holder}"

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise DeadlineError(self._phase, (self._name,), self._timeout_s)
            time.sleep(0)


class _Closes(Protocol):
    def close(self) -> None: ...


def _close_all(mapped: Sequence[_Closes]) -> None:
    for each in mapped:
        each.close()
