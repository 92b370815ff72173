"""A holder's parts of the next version, staged and digested while engines serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.errors import StateError, TransportError
from weightsync.faults import inject
from weightsync.holder.part_deltas import PartDeltas
from weightsync.holder.snapshots import HEADER_NBYTES, SnapshotContent, SnapshotStore
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.memory.kernels.host_table import HostPart, HostTable
from weightsync.plan import Plan
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import (
    Snapshot,
    SnapshotHeader,
    SnapshotPart,
    StagedPart,
    StageTask,
    StagingMemory,
)
from weightsync.protocol.timing import PhaseClock
from weightsync.readers.mapped import can_map

if TYPE_CHECKING:
    from weightsync.holder.device_staging import DeviceStaging

_CHUNK_NBYTES = 4 << 20
"""Bytes that one thread digests at a time."""


class StagedParts:
    """Fills the spare memory of a snapshot store, and digests it.

    Attributes:
        memory: the allocated memory.
    """

    def __init__(
        self,
        plan: Plan,
        store: SnapshotStore,
        parts: Sequence[int],
        engine: DeviceStaging | None,
        device: str,
    ) -> None:
        """Reserve memory for two versions of each of `parts`. Raises TransportError if memory is short.

        If `engine`, also reserve a second copy of the engine rank's weights, if the rank's GPU has the
        memory. `device`: ``cuda`` to make and use deltas on the current GPU.
        """
        self._plan, self._store, self._engine = plan, store, engine
        self._deltas = PartDeltas(plan, store, device == "cuda")
        offers = store.reserve_spares({part: plan.send_buffer_nbytes(part) for part in parts})
        self.memory = _with_second_copy(offers, engine)
        # One table for each place, made now, so that no update plans anything.
        self._tables = {
            memory.data_ptr(): HostTable([*_parts(plan, part, memory.data_ptr())], len(plan.tensors))
            for part in parts
            for memory in store.memory(part)
        }

    def stage(
        self, task: StageTask, content: SnapshotContent | None, timeout_s: float
    ) -> Sequence[StagedPart]:
        """Save `content` and copy other holders' parts, as `task` says. `timeout_s` is for each 64 MiB.

        Raises ReadError or DeadlineError, naming the holder that was read; WireError for a damaged delta;
        TransportError when a later task began; StateError when there is nothing to save.
        """
        turn, staged = self._store.begin_staging(), []
        if task.save:
            if content is None:
                raise StateError(f"{self._store.name} has nothing to stage: it is being connected again")
            clock, delta = PhaseClock(), None
            compared = self._deltas.compared(task.save, content) if task.delta else None
            with clock.phase("save"):
                offer = self._store.snapshot(task.save, task.expected, compared or content, turn)
            saved = self._staged(task, task.save, offer, clock)
            if compared:
                with clock.phase("delta"):
                    delta = self._deltas.make(task.save, compared)
            staged.append(replace(saved, delta=delta, spans=clock.spans))
        staged += [self._copied(task, copy, timeout_s, turn) for copy in task.copies]
        if task.to_device:
            self._to_device(task.to_device, timeout_s)
        return staged

    def _copied(self, task: StageTask, copy: SnapshotPart, timeout_s: float, turn: int) -> StagedPart:
        if delta := task.deltas.get(copy.header.part):
            self._deltas.reserve(copy.header.part, delta)  # once, so that the link is not judged by it
        clock, way, offer = PhaseClock(), "mapped" if can_map(copy.offer) else copy.offer.protocol, None
        with clock.phase("copy"):
            if delta:
                offer = self._deltas.copy(copy, delta, timeout_s, turn)
            if delta and offer:
                way, nbytes = f"{way}, delta", delta.nbytes
            else:
                offer = self._store.replicate(copy, timeout_s, turn)
                nbytes = copy.offer.memory.nbytes - HEADER_NBYTES
        staged = self._staged(task, copy.header, offer, clock)
        return replace(staged, way=way, nbytes=nbytes, spans=clock.spans)

    def _to_device(self, snapshot: Snapshot, timeout_s: float) -> None:
        held = self._store.parts(snapshot)
        if held is None:
            raise StateError(f"{self._store.name} does not map all parts that were staged on its host")
        if self._engine is None or (second := self._engine.second_copy()) is None:
            raise StateError(f"{self._store.name} does not write its engine's weights any more")
        second.fill(snapshot, held, self._engine, timeout_s)

    def _staged(self, task: StageTask, header: SnapshotHeader, offer: Offer, clock: PhaseClock) -> StagedPart:
        held = self._store.held(header)
        if held is None:
            raise StateError(f"{self._store.name}: part {header.part} was replaced while it was staged")
        inject("stage", version=header.version, data=held.bytes)
        if not task.digests:
            return StagedPart(header.part, offer, None)
        table = self._tables[held.bytes.data_ptr()]
        with clock.phase("digest"):
            table.run_all()
        return StagedPart(header.part, offer, fingerprint(table.digests()))


def _with_second_copy(offers: Mapping[int, Sequence[Offer]], engine: DeviceStaging | None) -> StagingMemory:
    try:
        return StagingMemory(offers, engine is not None and engine.second_copy() is not None)
    except TransportError as error:
        return StagingMemory(offers, has_second_copy=False, shortage=str(error))


def _parts(plan: Plan, part: int, address: int) -> Iterator[HostPart]:
    """Yield all that trainer rank `part` sends, in a send buffer's layout from `address` on."""
    for piece in plan.trainer_pieces(part):
        meta, at = plan.tensors[piece.tensor], address + piece.send_buffer_offset
        for box in piece.box.split(max(_CHUNK_NBYTES // meta.itemsize, 1)):
            yield HostPart(tensor=piece.tensor, address=at, box=box, shape=meta.shape, itemsize=meta.itemsize)
            at += box.numel * meta.itemsize
