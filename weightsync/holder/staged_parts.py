"""A holder's parts of the next version, staged and digested while engines serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weightsync.errors import StateError
from weightsync.faults import inject
from weightsync.holder.snapshots import SnapshotContent, SnapshotStore
from weightsync.memory.fingerprints import fingerprint
from weightsync.memory.host_table import HostPart, HostTable
from weightsync.plan import Plan
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import SnapshotHeader, StagedPart, StageTask
from weightsync.readers.mapped import can_map

_CHUNK_NBYTES = 4 << 20
"""Bytes that one thread digests at a time."""


class StagedParts:
    """Fills the spare memory of a snapshot store, and digests what lies there.

    Attributes:
        offers: how the memory of each part is read, for both versions.
    """

    def __init__(self, plan: Plan, store: SnapshotStore, parts: Sequence[int]) -> None:
        """Reserve memory for two versions of each of `parts`. Raises TransportError when it is short."""
        self._plan, self._store = plan, store
        self.offers = store.reserve_spares({part: plan.send_buffer_nbytes(part) for part in parts})
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

        Raises ReadError or DeadlineError, naming the holder that was read; TransportError when a later task
        began; StateError when there is nothing to save.
        """
        turn, staged = self._store.begin_staging(), []
        if task.save:
            if content is None:
                raise StateError(f"{self._store.name} has nothing to stage: it is being connected again")
            offer = self._store.snapshot(task.save, task.expected, content, turn)
            staged.append(self._staged(task, task.save, offer, ""))
        for copy in task.copies:
            way = "mapped" if can_map(copy.offer) else copy.offer.protocol
            offer = self._store.replicate(copy, timeout_s, turn)
            staged.append(self._staged(task, copy.header, offer, way))
        return staged

    def _staged(self, task: StageTask, header: SnapshotHeader, offer: Offer, way: str) -> StagedPart:
        held = self._store.held(header)
        if held is None:
            raise StateError(f"{self._store.name}: part {header.part} was replaced while it was staged")
        inject("stage", version=header.version, data=held.bytes)
        if not task.digests:
            return StagedPart(header.part, offer, None, way, len(held.bytes))
        table = self._tables[held.bytes.data_ptr()]
        table.run_all()
        return StagedPart(header.part, offer, fingerprint(table.digests()), way, len(held.bytes))


def _parts(plan: Plan, part: int, address: int) -> Iterator[HostPart]:
    """Yield all that trainer rank `part` sends, in a send buffer's layout from `address` on."""
    for piece in plan.trainer_pieces(part):
        meta, at = plan.tensors[piece.tensor], address + piece.send_buffer_offset
        for box in piece.box.split(max(_CHUNK_NBYTES // meta.itemsize, 1)):
            yield HostPart(tensor=piece.tensor, address=at, box=box, shape=meta.shape, itemsize=meta.itemsize)
            at += box.numel * meta.itemsize
