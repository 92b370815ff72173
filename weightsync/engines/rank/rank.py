"""One rank's side of an update, in the rank's process. vLLM and SGLang share it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from weightsync.channel.engine_end import EngineFeed
from weightsync.config import Treatment
from weightsync.engines.drafts.draft_model import DraftModel, HasDraft
from weightsync.engines.drafts.frozen_draft import FrozenDraft
from weightsync.engines.drafts.trained_draft import TrainableDraft, TrainedDraft
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.live_writer import LiveWriter, exported
from weightsync.engines.loading.load_errors import naming_load
from weightsync.engines.loading.loader_trace import UnprovableError, trace
from weightsync.engines.loading.whole_loads import Converts, WholeLoads
from weightsync.engines.loading.whole_sink import Loader, synchronize
from weightsync.engines.lora.adapter_rank import AdapterRank, AdapterSlots
from weightsync.engines.rank.rank_host import RankHost
from weightsync.engines.rank.rank_process import RankProcess
from weightsync.errors import EngineError, StateError, TransportError, WeightSyncError
from weightsync.faults import Fault, set_faults
from weightsync.memory.kernels.device_kernels import load_digests
from weightsync.memory.tensors import device_id
from weightsync.plan import Plan, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.arrangement import Experts, arrangement_key
from weightsync.plan.layout.draft import Draft
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.log_level import use_log_level
from weightsync.protocol.messages import Attached, FeedTicket, Loaded
from weightsync.text import count_text


class Host(Converts, Protocol):
    """Calls from a rank to the engine that it is part of."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the model's own loader on tensors of `checkpoint`, which it iterates over lazily."""

    def checkpoint(self) -> Checkpoint:
        """Return the full-precision checkpoint of the engine's model. Raises ConfigError if it has none."""

    def stored_otherwise(self) -> str:
        """Return why live parameters may differ from the loader's bytes; "" if they do not."""

    def loader(self, stored: bool) -> Loader:
        """Return the engine's loader of whole tensors, for one update. Raises EngineError if it has none.

        `stored`: they are those that the engine's own checkpoint stores, see `Checkpoint`.
        """


@runtime_checkable
class Rehearses(Protocol):
    """A host that can run the loader without tensors."""

    def rehearse(self) -> Sequence[TensorMeta]:
        """Return the tensors of `Host.checkpoint` that are known in the dtypes that the loader keeps.

        Nothing changes. Raises ConfigError if the loader leaves out a tensor.
        """


@runtime_checkable
class ArrangesExperts(Protocol):
    """A host whose engine may move experts between slots."""

    def experts(self) -> Experts:
        """Return the expert in each slot of all ranks now, by layer. Empty if experts stay."""

    def move_experts(self, experts: Experts) -> None:
        """Copy experts between slots, all ranks at the same time."""

    def arranged(self, layout: RankLayout, live: Mapping[str, torch.Tensor]) -> RankLayout:
        """Return the layout of the loader for the experts that are in the slots now.

        `live` has the layout's buffers. Raises UnprovableError.
        """


@runtime_checkable
class KnowsSleep(Protocol):
    """A host that knows which of its memory sleeps, whoever put it to sleep."""

    def asleep(self) -> Collection[str]:
        """Return the parts that have no memory now, such as ``weights``."""


class Rank:
    """One rank. `answer` calls its methods by name, one at a time."""

    def __init__(
        self, kind: str, rank: int, device: torch.device, host: Host, slots: AdapterSlots | None = None
    ) -> None:
        """`slots`: the adapter slots of an engine that serves adapters."""
        self._rank, self._device, self._host, self._slots = rank, device, host, slots
        self._logger = logging.getLogger(f"weightsync.engines.{kind}")
        self._layout: RankLayout | None = None
        self._as_loaded: RankLayout | None = None
        self._attached: RankLayout | None = None
        self._experts: Experts = ()
        self._live: dict[str, torch.Tensor] = {}
        self._feed: EngineFeed | None = None
        self._writer: LiveWriter | None = None
        self._whole: WholeLoads | None = None
        self._is_treated = False
        self._draft: DraftModel | None = None
        self._frozen: FrozenDraft | None = None
        self._trained: TrainedDraft | None = None
        self._takes_stored = False
        self._engine = ""
        self._adapters: dict[tuple[int, ...], AdapterRank] = {}

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
        self._begin_loading([2])  # weights mostly have 16 bits
        return RankProcess.join(self._rank, engine_pid)

    def host(self) -> RankHost:
        """Return this process's host."""
        return RankHost.here()

    def set_faults(self, process: str, faults: Sequence[Sequence[Fault]], seed: int) -> None:
        """Set this rank's part of `faults`, which has a list per rank."""
        if faults[self._rank] or not any(faults):
            set_faults(process, faults[self._rank], seed)

    def use_log_level(self, level: str) -> None:
        """Log from `level` on, see `weightsync.protocol.log_level.use_log_level`."""
        use_log_level(level)

    def treat(self, treatment: Treatment | None) -> None:
        """Apply `treatment` to the draft from the next `layout` on.

        Each load compares a frozen draft with the draft's bytes at this call. Raises ConfigError if the draft
        does not allow the treatment.
        """
        draft = self._host.draft(treatment) if isinstance(self._host, HasDraft) else None
        self._is_treated = True
        if draft and treatment == "frozen":
            self._frozen = self._frozen or FrozenDraft(draft, self._host.model(), self._device)
        before, self._trained = self._trained, None
        if draft and treatment == "trained":
            assert isinstance(draft, TrainableDraft)
            self._frozen, self._trained = None, TrainedDraft(draft, self._host.model())
        self._draft = draft
        if before or self._trained:
            self._layout = None
        elif self._layout:
            self._layout = self._with_draft(self._layout)

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
            self._require_awake()
            self._layout = self._with_draft(self._find_layout())
            if self._layout.buffers:
                self._begin_loading({meta.itemsize for meta in self._layout.tensors})
        elif self._as_loaded and self._moved(self._layout):
            self._layout = self._with_draft(self._arranged(self._as_loaded))
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
        self._layout = self._with_draft(self._whole_layout(self._found_checkpoint()))
        return LayoutTable.of(self._layout)

    def addresses(self) -> dict[str, int]:
        """Return the address of each live parameter. They do not change, since CUDA graphs use them."""
        return {name: each.data_ptr() for name, each in self._host.model().named_parameters()}

    def can_export(self, asleep: bool) -> bool:
        """Return True if `attach` would export the live memory now. While `asleep`, there is none."""
        return self.export(asleep) is not None

    def export(self, asleep: bool) -> DeviceMemory | None:
        """Return the memory that `attach` would export now, unless tensors are cast."""
        return exported(self._live) if not asleep and self._own_layout().buffers else None

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float, asleep: bool) -> Attached:
        """Connect to the holder. `tickets` has all ranks'. While `asleep`, the weights have no memory.

        Raises StateError if the weights sleep and the caller does not know it.
        """
        if not asleep:
            self._require_awake()
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
                self._make_loader,
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
        self._require_same_draft()
        return loaded

    def close(self) -> None:
        """Drop the connection to the holder."""
        self._writer = self._whole = None
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def adapter(self, spec: AdapterSpec, numbers: Sequence[int], method: str, args: Sequence[Any]) -> object:
        """Call a method of the `AdapterRank` with these slots. ``layout`` makes it, and ``close`` ends it."""
        key = tuple(numbers)
        if key not in self._adapters:
            if method == "close":
                return None
            if method != "layout" or self._slots is None:
                raise StateError(f"adapter {spec.name} has no slots here: register it again")
            self._adapters[key] = AdapterRank(self._rank, spec, key, self._slots)
        answer = getattr(self._adapters[key], method)(*args)
        if method == "close":
            del self._adapters[key]
        return answer

    def call_slots(self, method: str, args: Sequence[Any]) -> None:
        """Call a method of the slots, for engines that fill and find them by calls of their own."""
        assert self._slots, "an engine of this kind gives its ranks slots"
        getattr(self._slots, method)(*args)

    def _require_awake(self) -> None:
        if "weights" in self.asleep():
            raise StateError(f"the weights of rank {self._rank} are asleep: wake them before an update")

    def _with_draft(self, layout: RankLayout) -> RankLayout:
        if self._draft is None:
            return layout
        held = self._trained or self._frozen
        return replace(layout, draft=held.describe() if held else Draft(self._draft.method, self._draft.path))

    def _require_same_draft(self) -> None:
        if self._frozen and (changed := self._frozen.changed()):
            names = ", ".join(f"draft {name}" for name in changed[:3])
            cause = (
                f"{names}: bytes are not those that it started with, of {count_text(len(changed), 'tensor')}"
            )
            raise EngineError(self._engine, "verify", cause, self._rank)

    def _begin(self, feed: EngineFeed, attempt: int) -> None:
        try:
            self._require_awake()
            self._require_same_experts()
            if self._writer:
                self._writer.begin(self._current())
        except StateError as error:
            feed.refuse(attempt, error)
            raise

    def _current(self) -> dict[str, torch.Tensor]:
        """Return the current parameters and buffers by name."""
        model = self._served()
        return {**dict(model.named_buffers()), **dict(model.named_parameters())}

    def _begin_loading(self, itemsizes: Collection[int]) -> None:
        """Load kernels before they are needed, so that `attach` need not wait for CuPy."""
        if self._device.type == "cuda":
            on_daemon(partial(self._load_kernels, itemsizes), "weightsync-kernels")

    def _load_kernels(self, itemsizes: Collection[int]) -> None:
        with suppress(TransportError), torch.cuda.device(self._device):  # `attach` reports the error
            load_digests(itemsizes)

    def _served(self) -> torch.nn.Module:
        """Return all that updates write."""
        return self._trained.modules if self._trained else self._host.model()

    def _found_checkpoint(self) -> Checkpoint:
        found = self._host.checkpoint()
        return self._trained.join(found) if self._trained else found

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._trained:
            self._trained.load_weights(self._host.load_weights, weights)
        else:
            self._host.load_weights(weights)

    def _make_loader(self) -> Loader:
        loader = self._host.loader(self._takes_stored)
        return self._trained.loader(loader) if self._trained else loader

    def _stored_otherwise(self) -> str:
        return self._host.stored_otherwise() or (
            self._trained.draft.stored_otherwise() if self._trained else ""
        )

    def _find_layout(self) -> RankLayout:
        checkpoint = self._found_checkpoint()
        device = device_id(self._device)
        if reason := self._stored_otherwise():
            level = logging.INFO if self._device.type == "cpu" else logging.WARNING
            self._logger.log(level, "rank %d loads whole tensors: %s", self._rank, reason)
        else:
            try:
                traced = trace(
                    self._served(), checkpoint.tensors, checkpoint.tied, device, self._load_weights
                )
                self._live = traced.live
                return self._arranged(traced.layout)
            except UnprovableError as error:
                self._logger.warning("rank %d loads whole tensors: %s", self._rank, error)
        return self._whole_layout(checkpoint)

    def _whole_layout(self, checkpoint: Checkpoint) -> RankLayout:
        kept = self._host.rehearse() if isinstance(self._host, Rehearses) else ()
        by_name = {meta.name: meta for meta in kept}
        tensors = tuple(by_name.get(meta.name, meta) for meta in checkpoint.tensors)
        return RankLayout(
            tensors,
            tuple(map(Segment.whole, tensors)),
            checkpoint.tied,
            device=device_id(self._device),
            converts=checkpoint.converts,
            stored=checkpoint.stored,
        )
