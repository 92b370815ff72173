"""An engine rank's quantised weights, which the holder writes from buckets or from the trainers' memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from weightsync.errors import TransportError
from weightsync.holder.quantizing_copy import QuantizingCopy, sources_on
from weightsync.memory.tensors import device_id
from weightsync.plan import Plan, Reads
from weightsync.protocol.handles import DeviceHandle, StoredExport
from weightsync.quantising.piece_memory import SlotPieces
from weightsync.quantising.quantizing_reads import QuantizingReads
from weightsync.quantising.quantizing_tables import NoKernelError, QuantizingTables
from weightsync.quantising.stored_places import StoredPlaces

logger = logging.getLogger("weightsync.holder")


class QuantisedRank:
    """The places of one rank's weights, and scratch memory on the current device.

    Attributes:
        tables: quantises buckets. None if there are no kernels for them, or no memory.
    """

    def __init__(
        self,
        plan: Plan,
        holder: int,
        slots: Sequence[torch.Tensor],
        export: StoredExport,
        memory: Mapping[str, torch.Tensor],
    ) -> None:
        """`slots` have the buckets. `memory` has the rank's buffers by name."""
        self._plan, self._holder, self._export = plan, holder, export
        self._places: StoredPlaces | None = None
        self._scratch: torch.Tensor | None = None
        self.tables: QuantizingTables | None = None
        try:
            self._places = places = StoredPlaces.of(export, memory)
            tables = QuantizingTables(plan, SlotPieces(plan, slots), places, places.formats)
            self._scratch = torch.empty(tables.nbytes, dtype=torch.uint8, device="cuda")
            tables.bind(self._scratch)
            self.tables = tables
        except (NoKernelError, TransportError, torch.OutOfMemoryError) as error:
            logger.info("the engine rank quantises buckets, not holder %d: %s", holder, error)

    def copy(self, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]) -> QuantizingCopy:
        """Prepare to quantise `reads`, in scratch memory that an update of buckets uses otherwise.

        Raises TransportError if there are no kernels for it, or no memory.
        """
        if self._places is None:
            raise TransportError(f"holder {self._holder} cannot quantise what it would read")
        try:
            stored = self._export.reads(self._plan.tensors)
            here = device_id(torch.device("cuda", torch.cuda.current_device()))
            sources = sources_on(here, reads, memory)
            quantizing = QuantizingReads(self._plan, stored, self._places, sources)
            scratch = self._scratch
            if scratch is None or scratch.nbytes < quantizing.nbytes:
                scratch = torch.empty(quantizing.nbytes, dtype=torch.uint8, device="cuda")
            return QuantizingCopy(quantizing, reads, memory, scratch)
        except (NoKernelError, torch.OutOfMemoryError) as error:
            raise TransportError(str(error)) from error
