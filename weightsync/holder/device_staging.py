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
from weightsync.holder.quantizing_copy import QuantizingCopy, sources_on
from weightsync.holder.second_copy import SecondCopy
from weightsync.holder.send_buffer import MappedSendBuffer, SendBuffer
from weightsync.holder.snapshots import FlatSnapshot
from weightsync.memory import cuda
from weightsync.memory.device import DeviceBuffer, MappedTensors
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.bucket_copies import bucket_rows
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.memory.tensors import device_id, segment_view
from weightsync.plan import Piece, Plan, Reads, Segment, Step
from weightsync.plan.broadcast.plan import Portion, by_tensor
from weightsync.plan.broadcast.portions import needed_portions
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory, Export, LiveExport
from weightsync.protocol.handles import DeviceHandle, Handle, StoredExport
from weightsync.protocol.messages import HolderDigests
from weightsync.quantising.piece_memory import SlotPieces
from weightsync.quantising.quantizing_reads import QuantizingReads
from weightsync.quantising.quantizing_tables import NoKernelError, QuantizingTables
from weightsync.quantising.stored_places import StoredPlaces
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
        self._pack: CopyTable | None = None
        self._casts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._unpack: CopyTable | None = None
        self._quantizing: QuantizingTables | None = None
        self._stored: StoredExport | None = None
        self._places: StoredPlaces | None = None
        self._scratch: torch.Tensor | None = None
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
        starts = [buffer.tensor.data_ptr() for buffer in self._buffers]
        self.source = memory = self._trainer = MappedTensors(trainer.memory)
        segments = by_tensor(self._plan, trainer.layout)
        dtypes = {meta.name: meta.dtype for meta in trainer.layout.tensors}
        cast = {
            index
            for index, held in enumerate(segments)
            if held and dtypes[held[0].tensor] != self._plan.tensors[index].dtype
        }
        self._pack = CopyTable(
            *bucket_rows(
                self._plan,
                segments,
                memory.addresses(),
                starts,
                into=False,
                only=lambda piece: self._is_own(piece) and piece.tensor not in cast,
            ),
            _NUM_BLOCKS,
        )
        for piece in (piece for bucket in self._plan.buckets() for piece in bucket.pieces if cast):
            if self._is_own(piece) and piece.tensor in cast:
                held = segments[piece.tensor]
                pairs = self._cast(piece, held, memory, dtypes[held[0].tensor])
                self._casts.setdefault(piece.bucket, []).extend(pairs)

    @collector_paused
    def map_ahead(self, engine: DeviceMemory) -> None:
        """Start to map the engine rank's coming exports. Raises TransportError as `MappedTensors`."""
        self._ahead = MappedTensors(engine)
        self._ahead.map_ahead()

    @collector_paused
    def link(self, engine: Export | LiveExport | None) -> None:
        """Take the engine rank's memory for the previous one's, which is unmapped.

        A mapping of the same memory by `map_ahead` is used. Else it is mapped at once if buckets are written
        to it, or when it is used. Raises TransportError if that fails.
        """
        ahead, self._ahead = self._ahead, None
        self._let_go_of_engine()
        if ahead and not (engine and engine.memory == ahead.memory):
            ahead.close()
            ahead = None
        if engine is None:
            return
        self._engine = memory = ahead or MappedTensors(engine.memory)
        self.flat = FlatSnapshot(memory)
        if isinstance(engine, LiveExport):
            if engine.places:
                self._prepare_to_quantize(engine.places, memory)
            return
        self.target, self._export = memory, engine
        starts = [buffer.tensor.data_ptr() for buffer in self._buffers]
        segments = self._segments if starts else ()  # else a refill needs none
        address = memory.addresses() if starts else {}
        rows = bucket_rows(self._plan, segments, address, starts, into=True)
        self._unpack = CopyTable(*rows, _NUM_BLOCKS)
        buckets = range(self._plan.num_buckets if starts else 0)
        self.needs = [needed_portions(self._plan, bucket, segments) for bucket in buckets]

    @property
    def quantizes(self) -> bool:
        """Return True if the holder can quantise into the engine rank's memory."""
        return self._quantizing is not None

    def quantized(self) -> HolderDigests:
        """Return the digests of the quantised slots, after `wait_written`."""
        assert self._quantizing is not None
        return self._quantizing.result()

    def _prepare_to_quantize(self, export: StoredExport, memory: Mapping[str, torch.Tensor]) -> None:
        """Prepare to quantise reads into `memory`, and buckets if there are kernels for them."""
        if not self._buffers:
            return
        try:
            self._stored, self._places = export, StoredPlaces.of(export, memory)
            self._prepare_buckets(self._places)
        except (NoKernelError, TransportError, torch.OutOfMemoryError) as error:
            logger.info("the engine rank quantises buckets, not holder %d: %s", self._index, error)

    def _prepare_buckets(self, places: StoredPlaces) -> None:
        pieces = SlotPieces(self._plan, [each.tensor for each in self._buffers])
        tables = QuantizingTables(self._plan, pieces, places, places.formats)
        self._scratch = torch.empty(tables.nbytes, dtype=torch.uint8, device=self.device)
        tables.bind(self._scratch)
        self._quantizing = tables

    def _quantizing_copy(
        self, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]
    ) -> QuantizingCopy:
        """Prepare to quantise `reads`, in scratch memory that an update of buckets uses otherwise."""
        if self._stored is None or self._places is None:
            raise TransportError(f"holder {self._index} cannot quantise what it would read")
        try:
            stored = self._stored.reads(self._plan.tensors)
            here = device_id(torch.device("cuda", torch.cuda.current_device()))
            sources = sources_on(here, reads, memory)
            quantizing = QuantizingReads(self._plan, stored, self._places, sources)
            scratch = self._scratch
            if scratch is None or scratch.nbytes < quantizing.nbytes:
                scratch = torch.empty(quantizing.nbytes, dtype=torch.uint8, device=self.device)
            return QuantizingCopy(quantizing, reads, memory, scratch)
        except (NoKernelError, torch.OutOfMemoryError) as error:
            raise TransportError(str(error)) from error

    @collector_paused
    def second_copy(self) -> SecondCopy | None:
        """Return memory for another version of the engine rank's weights, allocated by the first call.

        There is none if the holder does not write them. Raises TransportError when the device is short of it.
        """
        if self._second_copy is None and self.writes:
            self._second_copy = SecondCopy(self._plan, self._segments, self._address(), self.needs)
        return self._second_copy

    @collector_paused
    def route(self, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        """Map `memory`, trainers' buffers by rank and name, for direct copies. Raises TransportError.

        `reads` has the reads of changing tensors and, if these are separate, the reads of frozen tensors.
        """
        self._let_go_of_trainers()
        if not any(map(len, reads)):
            return
        if not self.target:
            self._direct_copy = self._quantizing_copy(reads, memory)
        else:
            self._direct_copy = DirectCopy(self._plan, self._segments, reads, memory, self._address())

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
            self._pack.launch(bucket, stream)
            for target, source in self._casts.get(bucket, ()):
                target.copy_(source)
        elif isinstance(self._send_buffer, MappedSendBuffer):
            self._send_buffer.fill(bucket, self.slot(bucket))
        elif self._send_buffer is not None:
            data = self._send_buffer.tensor
            own = [step for step in self._plan.bucket_steps(bucket) if step.root == self._index]
            starts = [(step, step.send_buffer_offset) for step in own]
            self._load(bucket, [(step.offset, data[at : at + step.nbytes]) for step, at in starts])
        return [self.mark(f"filling of bucket {bucket}", timeout_s)]

    def load(
        self, bucket: int, parts: Sequence[tuple[int, torch.Tensor]], timeout_s: float
    ) -> Sequence[Pending]:
        """Start copying `parts`, uint8[n] on the host with their offsets, to a bucket's slot."""
        if free := self._free.get(bucket % len(self._buffers)):
            self._filling.wait_event(free)
        self._load(bucket, parts)
        return [self.mark(f"filling of bucket {bucket}", timeout_s)]

    def _load(self, bucket: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        slot, stream = self.slot(bucket).data_ptr(), torch.cuda.current_stream()
        for offset, held in parts:
            cuda.copy(slot + offset, held.data_ptr(), len(held), stream)

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

        If the holder `quantizes`, buckets must be written in order.
        """
        if self._quantizing:
            self._quantizing.run(bucket, self._writing)
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
        self._pack, self._casts = None, {}
        self._let_go_of_engine()
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

    def _address(self) -> dict[str, int]:
        return self._engine.addresses() if self._engine else {}

    def _let_go_of_engine(self) -> None:
        _close_all(self._taken_from_engine())

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
        self._stored = self._places = self._scratch = self._quantizing = None
        return mapped

    def _let_go_of_trainers(self) -> None:
        if self._direct_copy:
            self._direct_copy.close()
            self._direct_copy = None

    def slot(self, bucket: int) -> torch.Tensor:
        """Return the slot of a bucket: uint8, one dimension."""
        return self._buffers[bucket % len(self._buffers)].tensor

    def _is_own(self, piece: Piece) -> bool:
        return self._plan.members.trainers[piece.trainer] == self._index

    def _cast(
        self, piece: Piece, segments: Sequence[Segment], memory: Mapping[str, torch.Tensor], dtype: str
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (target, source) views of a piece that torch has to cast."""
        meta = self._plan.tensors[piece.tensor]
        slot = self.slot(piece.bucket)[piece.offset : piece.offset + piece.nbytes]
        target = slot.view(getattr(torch, meta.dtype)).view(piece.box.extent)
        pairs = []
        for segment in segments:
            part = piece.box.intersect(segment.box)
            if part is not None:
                held = segment_view(memory[segment.buffer].view(getattr(torch, dtype)), segment)
                pairs.append((target[part.slices(piece.box)], held[part.slices(segment.box)]))
        return pairs


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
