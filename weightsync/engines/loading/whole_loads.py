"""The loads of a rank that needs whole tensors because the engine's loader converts them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from weightsync.channel.feed import EngineFeed
from weightsync.engines.loading.live_digest import EqualLoads, LiveParameters
from weightsync.engines.loading.quantizing_sink import QuantizingSink
from weightsync.engines.loading.whole_sink import Loader, WholeSink
from weightsync.errors import PlanError, StateError, TransportError
from weightsync.plan import Plan
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import LiveMemory, StoredTable
from weightsync.protocol.handles import StoredExport
from weightsync.protocol.messages import Loaded
from weightsync.quantising.piece_memory import SlotPieces
from weightsync.quantising.quantizing_tables import NoKernelError, QuantizingTables
from weightsync.quantising.stored_places import StoredPlaces


class Converts(Protocol):
    """An engine rank whose loader may convert tensors."""

    def model(self) -> torch.nn.Module:
        """Return the model that serves."""

    def converted(self) -> torch.nn.Module | None:
        """Return the model if its loader converts tensors to the same bytes in all engines alike."""

    def places(self) -> StoredPlaces | None:
        """Return where live parameters hold what the loader stores; None if that is not known.

        The first call finds the places. No weights change. Once parameters moved, another object is returned.
        """


class WholeLoads:
    """Loads whole tensors from one holder, for one plan.

    The first load goes through the engine's loader, and shows whether the places that were traced are right.
    If they are, the holder quantises into them from then on, or the rank does if the holder cannot.
    """

    def __init__(
        self,
        host: Converts,
        feed: EngineFeed,
        plan: Plan,
        device: torch.device,
        make_loader: Callable[[], Loader],
        takes_stored: bool,
        logger: logging.Logger,
    ) -> None:
        """`takes_stored`: the tensors come from the engine's own quantised checkpoint."""
        self._host, self._feed, self._plan, self._device = host, feed, plan, device
        self._make_loader, self._takes_stored, self._logger = make_loader, takes_stored, logger
        model = host.converted()
        self._parameters = None if model is None else LiveParameters(model, device)
        packed = LiveParameters(host.model(), device) if device.type == "cpu" else None
        self._equal = EqualLoads(self._parameters or packed)
        self._tables: QuantizingTables | None = None
        self._has_kernels = not feed.casts  # they read slots
        self._exported: StoredPlaces | None = None
        self._reads: LayoutTable | None = None
        self._is_allowed = False

    def attach(self) -> LiveMemory | None:
        """Export the live parameters, if a copy of them can bring them back, and prepare to quantise."""
        export = self._export()
        if export is None or self._exported is None:
            self._prepare_tables()
            return export
        self._allow()
        return replace(export, takes_parts=self._takes_parts)

    def load(self, attempt: int, timeout_s: float) -> Loaded:
        """Load one attempt's buckets, or their conversion by the holder."""
        self._require_exported(attempt)
        sink = self._in_place_sink() or WholeSink(
            self._plan, self._make_loader, self._device, self._parameters, self._exported
        )
        if self._is_allowed and self._parameters:
            self._parameters.find()  # while the holder writes
        try:
            digests = self._feed.receive(attempt, sink, timeout_s)
        except Exception:
            sink.abandon()
            raise
        if not sink.is_copied:
            self._equal.require(digests, sink.live)
        self._prepare_next(by_holder=sink.is_copied or sink.quantized is not None)
        return Loaded(
            digests,
            self._feed.spans,
            sink.live,
            are_live=False,
            are_copied=sink.is_copied,
            are_compared=sink.quantized is not None or self._shown_places() is not None,
            are_parts=sink.quantized is not None and sink.quantized.are_parts,
            takes_parts=self._takes_parts,
        )

    def _export(self) -> LiveMemory | None:
        if self._parameters is None or not self._parameters.can_export:
            return None
        places = self._host.places() if self._has_kernels else None
        if places:
            self._parameters.use(places)
        try:
            export = self._parameters.export()
        except TransportError as error:
            self._logger.warning("a rank is not filled from copies of its parameters: %s", error)
            return None
        if places is None:
            return export
        self._exported = places
        stored = places.export({} if self._takes_stored else places.formats)
        self._reads = self._find_reads(stored)
        return replace(export, places=StoredTable.of(stored), reads=self._reads)

    def _find_reads(self, stored: StoredExport) -> LayoutTable | None:
        """Return the parts of the plan's tensors that the rank needs; None for whole tensors."""
        plan = self._plan
        try:
            return LayoutTable.of(reads_layout(plan.tensors, plan.tied, stored.reads(plan.tensors)))
        except PlanError as error:
            self._logger.info("a rank needs whole tensors in each update: %s", error)
            return None

    def _allow(self) -> None:
        """Have the holder quantise, if it is shown that the places are right that it has."""
        if self._exported is not None and self._shown_places() is self._exported:
            self._feed.allow_writing()
            self._is_allowed = True

    @property
    def _takes_parts(self) -> bool:
        return self._is_allowed and self._reads is not None

    def _prepare_next(self, by_holder: bool) -> None:
        """Have the holder quantise from the next load on, or do it here if the holder did not."""
        if not self._is_allowed:
            self._allow()
            by_holder = self._is_allowed
        if not by_holder and self._tables is None:
            self._prepare_tables()

    def _require_exported(self, attempt: int) -> None:
        if self._is_allowed and self._host.places() is not self._exported:
            error = StateError("live parameters are in other memory than when connected: connect() again")
            self._feed.refuse(attempt, error)
            raise error

    def _shown_places(self) -> StoredPlaces | None:
        places = self._host.places()
        return places if places is not None and places.are_right else None

    def _in_place_sink(self) -> QuantizingSink | None:
        """Return a sink that quantises in place; None until that is prepared, or if parameters moved."""
        if self._tables is None or self._parameters is None:
            return None
        if self._host.places() is not self._tables.places:
            self._tables = None
            return None
        return QuantizingSink(self._tables, self._plan, self._parameters)

    def _prepare_tables(self) -> None:
        """Prepare to quantise in this process, where an update has shown that the places are right."""
        places = self._shown_places()
        if self._parameters is None or places is None or not self._has_kernels:
            return
        try:
            formats = {} if self._takes_stored else places.formats
            tables = QuantizingTables(self._plan, SlotPieces(self._plan, self._feed.slots), places, formats)
            tables.bind(torch.empty(tables.nbytes, dtype=torch.uint8, device=self._device))
            self._tables = tables
        except (NoKernelError, TransportError, torch.OutOfMemoryError) as error:
            self._has_kernels = False  # until the next plan
            self._logger.info("a rank quantises tensor by tensor: %s", error)
