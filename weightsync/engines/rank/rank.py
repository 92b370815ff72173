"""One rank's side of an update, in the rank's process. vLLM and SGLang share it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from weightsync.channel.feed import EngineFeed
from weightsync.config import Treatment
from weightsync.engines.drafts.frozen_draft import FrozenDraft
from weightsync.engines.loading.live_writer import LiveWriter, exported
from weightsync.engines.loading.load_errors import naming_load
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.whole_loads import WholeLoads
from weightsync.engines.loading.whole_sink import synchronize
from weightsync.engines.lora.adapter_rank import AdapterRanks, AdapterSlots
from weightsync.engines.rank.host import ArrangesExperts, Host, KnowsSleep
from weightsync.engines.rank.rank_host import RankHost
from weightsync.engines.rank.rank_process import RankProcess
from weightsync.engines.rank.written_model import WrittenModel
from weightsync.errors import EngineError, StateError, TransportError, WeightSyncError
from weightsync.faults import Fault, set_faults
from weightsync.memory.kernels.device_kernels import load_digests
from weightsync.plan import Plan, RankLayout
from weightsync.plan.layout.arrangement import Experts, arrangement_key
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.log_level import use_log_level
from weightsync.protocol.messages import Attached, FeedTicket, Loaded
from weightsync.text import count_text


class Rank:
    """One rank. `answer` calls its methods by name, one at a time."""

    host = staticmethod(RankHost.here)
    use_log_level = staticmethod(use_log_level)

    def __init__(
        self, kind: str, rank: int, device: torch.device, host: Host, slots: AdapterSlots | None = None
    ) -> None:
        """`slots`: the adapter slots of an engine that serves adapters."""
        self._rank, self._device, self._host = rank, device, host
        self._logger = logging.getLogger(f"weightsync.engines.{kind}")
        self._layout: RankLayout | None = None
        self._as_loaded: RankLayout | None = None
        self._attached: RankLayout | None = None
        self._experts: Experts = ()
        self._live: dict[str, torch.Tensor] = {}
        self._feed: EngineFeed | None = None
        self._writer: LiveWriter | None = None
        self._whole: WholeLoads | None = None
        self._model, self._is_treated = WrittenModel(host, device), False
        self._takes_stored = False
        self._engine = ""
        adapters = AdapterRanks(rank, slots)
        self.adapter, self.call_slots = adapters.adapter, adapters.call_slots

    def answer(self, method: str, args: Sequence[Any]) -> object:
        """Call a method. Returns the result or the error; never raises, since that may end the engine."""
        try:
            return getattr(self, method)(*args)
        except WeightSyncError as error:
            return error
        except Exception as error:
            self._logger.exception("rank %d: %s failed", self._rank, method)
            return EngineError(self._engine, method, f"{type(error).__name__}: {error}", self._rank)

    def join(self, engine_pid: int) -> RankProcess | None:
        """Return this process as a rank of the engine, which has just started, see `RankProcess.join`."""
        _begin_loading(self._device, [2])  # weights mostly have 16 bits
        return RankProcess.join(self._rank, engine_pid)

    def set_faults(self, process: str, faults: Sequence[Sequence[Fault]], seed: int) -> None:
        """Set this rank's part of `faults`, which has a list per rank."""
        if faults[self._rank] or not any(faults):
            set_faults(process, faults[self._rank], seed)

    def treat(self, treatment: Treatment | None) -> None:
        """Apply `treatment` to the draft from the next `layout` on.

        Each load compares a frozen draft with the draft's bytes at this call. Raises ConfigError if the draft
        does not allow the treatment.
        """
        before, self._model = self._model, self._model.treated(treatment)
        self._is_treated = True
        if before.trained or self._model.trained:
            self._layout = None
        elif self._layout:
            self._layout = self._model.with_draft(self._layout)

    def layout(self) -> LayoutTable:
        """Return where the loader puts each tensor, if proven, else a layout of whole tensors.

        Whole tensors have no live buffers. The layout is found once for each `treat`, since live parameters
        keep their addresses.
        """
        return LayoutTable.of(self._own_layout())

    def _own_layout(self) -> RankLayout:
        if not self._is_treated:
            self.treat(None)
        if self._layout is None:
            _require_awake(self._rank, self.asleep())
            self._layout = self._model.with_draft(self._find_layout())
            if self._layout.buffers:
                _begin_loading(self._device, {meta.itemsize for meta in self._layout.tensors})
        elif self._as_loaded and self._moved(self._layout):
            self._layout = self._model.with_draft(self._arranged(self._as_loaded))
        return self._layout

    def experts(self) -> Experts:
        """Return the expert in each slot of all ranks now, by layer. Empty if experts stay.

        While weights sleep, experts stay where they were, and the engine's map may have no memory.
        """
        if isinstance(self._host, ArrangesExperts) and "weights" not in self.asleep():
            self._experts = self._host.experts()
        return self._experts

    def move_experts(self, experts: Experts) -> None:
        """Copy experts between slots, all ranks at the same time."""
        assert isinstance(self._host, ArrangesExperts)
        self._host.move_experts(experts)
        synchronize(self._device)

    def live_digests(self) -> Loaded:
        """Digest the live memory, without a load, by the layout of the last `attach`."""
        self._require_same_experts()
        assert self._writer, "ranks that move experts are written in place"
        return Loaded(self._writer.digests(), ())

    def _arranged(self, layout: RankLayout) -> RankLayout:
        self._as_loaded = layout
        self.experts()  # as they are known while asleep
        return self._host.arranged(layout, self._live) if isinstance(self._host, ArrangesExperts) else layout

    def _require_same_experts(self) -> None:
        if self._moved(self._attached):
            raise StateError("experts are in other slots than when it was connected: connect() again")

    def _moved(self, layout: RankLayout | None) -> bool:
        """Return True if experts are in other slots than `layout` says."""
        known = layout.arrangement if layout else None
        return known is not None and known.key != arrangement_key(self.experts())

    def reload(self) -> LayoutTable:
        """Take whole tensors from now on, even if the layout was proven."""
        self._layout = self._model.with_draft(self._model.whole_layout(self._model.checkpoint()))
        return LayoutTable.of(self._layout)

    def addresses(self) -> dict[str, int]:
        """Return the address of each live parameter. They do not change, since CUDA graphs use them."""
        return {name: each.data_ptr() for name, each in self._host.model().named_parameters()}

    def export(self, asleep: bool) -> DeviceMemory | None:
        """Return the memory that `attach` would export now, unless tensors are cast. None while `asleep`."""
        return exported(self._live) if not asleep and self._own_layout().buffers else None

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float, asleep: bool) -> Attached:
        """Connect to the holder. `tickets` has all ranks'. While `asleep`, the weights have no memory.

        Raises StateError if the weights sleep and the caller does not know it.
        """
        if not asleep:
            _require_awake(self._rank, self.asleep())
        self.close()
        layout, ticket = self._own_layout(), tickets[self._rank]
        self._attached = layout
        names = {meta.name for meta in plan.tensors}
        self._takes_stored = layout.takes_stored(names)
        self._feed = EngineFeed.open(ticket, plan, timeout_s, layout.for_tensors(names))
        self._engine, casts = ticket.engine, self._feed.casts
        if not layout.buffers:
            self._whole = WholeLoads(
                self._host,
                self._feed,
                plan,
                self._device,
                partial(self._model.loader, self._takes_stored),
                self._takes_stored,
                self._logger,
            )
            live = None if asleep else self._whole.attach()
            return Attached(self._feed.plan_digest, None, live, casts)
        self._writer = LiveWriter(
            plan,
            layout,
            self._live,
            self._feed.slots,
            readable=not asleep,
            views=self._feed.views,
            casts=casts,
            late=not asleep,
        )
        export = None if asleep else self._writer.export()
        return Attached(self._feed.plan_digest, export, casts=casts)

    def asleep(self) -> Collection[str]:
        """Return the parts that have no memory now, as far as the engine says."""
        return self._host.asleep() if isinstance(self._host, KnowsSleep) else ()

    def settle(self) -> None:
        """Wait for a step that may still run with the old weights."""
        synchronize(self._device)

    def blank(self) -> None:
        """Zero parameters that sleep dropped, since padding, as of a vocabulary, is not loaded."""
        with torch.no_grad():
            for parameter in self._host.model().parameters():
                parameter.zero_()
        synchronize(self._device)

    def load(self, attempt: int, timeout_s: float) -> Loaded:
        """Take one attempt's buckets.

        Raises EngineError if a draft's own tensors changed, or if the weights sleep: then nothing is written.
        """
        if self._feed is None:
            raise StateError("a rank is not attached: connect first")
        with naming_load(self._engine, self._rank):
            self._begin(self._feed, attempt)
            if self._writer:
                loaded = Loaded(self._feed.receive(attempt, self._writer, timeout_s), self._feed.spans)
            else:
                assert self._whole
                loaded = self._whole.load(attempt, timeout_s)
        if self._model.frozen:
            _require_same(self._model.frozen, self._engine, self._rank)
        return loaded

    def close(self) -> None:
        """Drop the connection to the holder."""
        self._writer = self._whole = None
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _begin(self, feed: EngineFeed, attempt: int) -> None:
        try:
            _require_awake(self._rank, self.asleep())
            self._require_same_experts()
            if self._writer:
                self._writer.begin(self._model.live())
        except StateError as error:
            feed.refuse(attempt, error)
            raise

    def _find_layout(self) -> RankLayout:
        checkpoint = self._model.checkpoint()
        if reason := self._model.stored_otherwise():
            level = logging.INFO if self._device.type == "cpu" else logging.WARNING
            self._logger.log(level, "rank %d loads whole tensors: %s", self._rank, reason)
        else:
            try:
                traced = self._model.traced(checkpoint)
                self._live = traced.live
                return self._arranged(traced.layout)
            except UnprovableError as error:
                self._logger.warning("rank %d loads whole tensors: %s", self._rank, error)
        return self._model.whole_layout(checkpoint)


def _require_awake(rank: int, asleep: Collection[str]) -> None:
    if "weights" in asleep:
        raise StateError(f"the weights of rank {rank} are asleep: wake them before an update")


def _require_same(draft: FrozenDraft, engine: str, rank: int) -> None:
    if changed := draft.changed():
        names = ", ".join(f"draft {name}" for name in changed[:3])
        cause = f"{names}: bytes are not those that it started with, of {count_text(len(changed), 'tensor')}"
        raise EngineError(engine, "verify", cause, rank)


def _begin_loading(device: torch.device, itemsizes: Collection[int]) -> None:
    """Load kernels before they are needed, so that `attach` need not wait for CuPy."""
    if device.type == "cuda":
        on_daemon(partial(_load_kernels, device, itemsizes), "weightsync-kernels")


def _load_kernels(device: torch.device, itemsizes: Collection[int]) -> None:
    with suppress(TransportError), torch.cuda.device(device):  # `attach` reports the error
        load_digests(itemsizes)
