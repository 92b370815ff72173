"""Deltas of staged parts: what changed in one's own, for other holders, and what changed in theirs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from msgspec.structs import replace

from weightsync.deltas.changes import Changes, Span
from weightsync.errors import ReadError, WireError
from weightsync.holder.snapshots import HEADER_NBYTES, Held, SnapshotStore
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Delta, SnapshotHeader, SnapshotPart


@dataclass(frozen=True, slots=True)
class _Content:
    """Changes as the content of a store's memory."""

    changes: Changes
    nbytes: int

    def save(self, to: torch.Tensor) -> None:
        self.changes.write(to.numpy())


class PartDeltas:
    """Makes and applies deltas of parts of one plan, in the memory of a snapshot store."""

    def __init__(self, plan: Plan, store: SnapshotStore) -> None:
        self._plan, self._store = plan, store
        self._spans = cache(self._find_spans)

    def make(self, header: SnapshotHeader) -> Delta | None:
        """Compare the staged part with the part's committed version, and save what changed.

        Returns None if no version with this layout is here. Changes that are no shorter than the tensors are
        not saved. Raises TransportError when memory is short.
        """
        began = time.perf_counter()
        base = self._store.committed(header.part)
        if base is None or base.layout != header.layout:
            return None
        old, new = self._store.own(base), self._store.own(header)
        if old is None or new is None:
            return None
        spans = self._spans(header.part)
        changes = Changes.between(spans, old.bytes.numpy(), new.bytes.numpy())
        offer, nbytes = None, changes.nbytes
        if nbytes < sum(span.nbytes for span in spans):
            offer = self._store.save_delta(replace(header, base=base.version), _Content(changes, nbytes))
        return Delta(base.version, offer, nbytes, time.perf_counter() - began)

    def copy(self, part: SnapshotPart, delta: Delta, timeout_s: float, turn: int) -> Offer | None:
        """Stage another holder's part: this holder's version `delta.base`, and the changes since.

        Returns None, and stages nothing, if that version is not here. Raises as `SnapshotStore.fetch`, also
        ReadError for a damaged delta.
        """
        base = self._store.own(replace(part.header, version=delta.base))
        if base is None or delta.offer is None:
            return None
        wanted = replace(part.header, base=delta.base)
        received = SharedBuffer.create(HEADER_NBYTES + delta.nbytes)
        try:
            with self._store.receiving(part, turn) as (buffer, offer):
                self._store.fetch(delta.offer, wanted, delta.nbytes, received, timeout_s, turn)
                changed = received.tensor[HEADER_NBYTES:].numpy()
                self._write(part, base, Changes.decode(self._spans(part.header.part), changed), buffer)
        except WireError as error:
            raise ReadError(delta.offer.holder, str(error)) from error
        finally:
            received.close()
        return offer

    @staticmethod
    def _write(part: SnapshotPart, base: Held, changes: Changes, buffer: SharedBuffer) -> None:
        body, header = buffer.tensor[HEADER_NBYTES:].numpy(), base.header
        body[:] = base.bytes.numpy()
        changes.apply(body)
        if header is None or base.header != header:
            raise WireError(f"part {part.header.part} was replaced while a delta of it was applied")

    def _find_spans(self, part: int) -> Sequence[Span]:
        sizes = [
            (piece, self._plan.tensors[piece.tensor].itemsize) for piece in self._plan.trainer_pieces(part)
        ]
        return [Span(piece.send_buffer_offset, piece.box.numel * size, size) for piece, size in sizes]
