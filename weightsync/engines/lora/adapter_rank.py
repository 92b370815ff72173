"""One rank's side of an adapter: two slots, of which one serves while the other is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weightsync.channel.feed import EngineFeed
from weightsync.engines.loading.device_sink import DeviceSink
from weightsync.engines.loading.live_writer import LiveWriter, exported
from weightsync.engines.loading.load_errors import naming_load
from weightsync.engines.lora.receive_buffer import ReceiveBuffer, SlotSink
from weightsync.errors import EngineError, StateError
from weightsync.plan import Plan, RankLayout
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.messages import Attached, FeedTicket, Loaded

_GLANCE_S = 0.003
"""How long `AdapterRank.begin` waits for the write to end, in seconds: the engine makes no tokens then."""

_Writer = LiveWriter | DeviceSink | SlotSink


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory of an engine for one version of an adapter.

    Attributes:
        number: the engine's number of the slot.
        layout: the places of the adapter's boxes in `live`. The slot has zeros elsewhere.
        live: tensors of the slot, uint8 or any other type, by the names of the layout's buffers.
    """

    number: int
    layout: RankLayout
    live: Mapping[str, torch.Tensor]


class AdapterSlots(Protocol):
    """The adapter slots of one rank of an engine."""

    def reserve(self, spec: AdapterSpec, numbers: Sequence[int]) -> Sequence[Slot]:
        """Reserve equal slots for `numbers`. Raises ConfigError if there are too few slots."""

    def require_held(self, number: int) -> None:
        """Raise StateError if the engine has given a reserved slot away, since others asked it to."""

    def release(self, numbers: Sequence[int]) -> None:
        """Give the slots back."""


class AdapterRank:
    """One adapter in one rank. A thread writes the slot while the engine makes tokens."""

    def __init__(self, rank: int, spec: AdapterSpec, numbers: Sequence[int], slots: AdapterSlots) -> None:
        """Reserve the slots. Raises as `AdapterSlots.reserve`."""
        self._rank, self._spec, self._slots, self._numbers = rank, spec, slots, tuple(numbers)
        self._held = {slot.number: slot for slot in slots.reserve(spec, numbers)}
        self._slot_layout = next(iter(self._held.values())).layout
        self._device = next(tensor.device for slot in self._held.values() for tensor in slot.live.values())
        self._received: ReceiveBuffer | None = None
        if self._device.type == "cuda":
            self._received = ReceiveBuffer(self._slot_layout, self._device)
        self._feed: EngineFeed | None = None
        self._busy = threading.Lock()
        self._writers: Mapping[int, _Writer] = {}
        self._engine = ""
        self._load: Future[Loaded] | None = None
        self._written = 0

    def layout(self) -> LayoutTable:
        """Return the boxes of the adapter's tensors that this rank serves."""
        return LayoutTable.of(self._received.layout if self._received else self._slot_layout)

    def can_export(self) -> bool:
        """Return True if holders on GPUs can write this rank's memory."""
        return self._received is not None and exported(self._received.live) is not None

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Attached:
        """Connect to the holder. `tickets` has all ranks'."""
        self._disconnect()
        ticket = tickets[self._rank]
        self._engine = ticket.engine
        self._feed = feed = EngineFeed.open(ticket, plan, timeout_s, busy=self._busy)
        with self._on_device():
            received = self._received if all(slot.is_cuda for slot in feed.slots) else None
            if received is None:
                self._writers = self._from_host(plan, feed)
                return Attached(plan.digest(), None)
            writer = LiveWriter(plan, received.layout, received.live, feed.slots, views=feed.views)
            self._writers = {
                number: SlotSink(plan, received, writer, slot.layout, slot.live, feed.slots)
                for number, slot in self._held.items()
            }
            return Attached(plan.digest(), writer.export())

    def _from_host(self, plan: Plan, feed: EngineFeed) -> Mapping[int, _Writer]:
        """Prepare to take buckets that are in host memory."""
        held, device = self._held.items(), self._device
        if device.type != "cuda":
            return {n: LiveWriter(plan, s.layout, s.live, feed.slots, views=feed.views) for n, s in held}
        bucket = torch.empty(max(map(len, feed.slots), default=0), dtype=torch.uint8, device=device)
        return {n: DeviceSink(plan, s.layout, s.live, feed.slots, bucket) for n, s in held}

    def begin(self, number: int, attempt: int, timeout_s: float) -> Loaded | None:
        """Start to write slot `number`, which no request may use. Returns or raises as `outcome`.

        It waits a moment, which is all that a write takes where GPUs are read in place. Raises StateError
        before `attach`. An earlier attempt that still runs ends first, or this one fails.
        """
        feed = self._feed
        if feed is None:
            raise StateError(f"adapter {self._spec.name} is not attached: connect first")
        writer, self._written = self._writers[number], number
        try:
            self._require_held()
        except EngineError as error:
            feed.refuse(attempt, error)
            raise
        self._load = on_daemon(
            lambda: self._write(feed, writer, attempt, timeout_s), f"adapter-{self._spec.name}"
        )
        wait([self._load], _GLANCE_S)
        return self.outcome()

    def outcome(self) -> Loaded | None:
        """Return the content of the slot, or None while it is written. Raises the error of the write."""
        assert self._load, "begin() comes first"
        loaded = self._load.result() if self._load.done() else None
        self._require_held()
        return loaded

    def _require_held(self) -> None:
        with naming_load(self._engine, self._rank):
            self._slots.require_held(self._written)

    def close(self) -> None:
        """Disconnect, and give the slots back. Raises StateError while a slot is being written."""
        self._disconnect()
        if self._load and not self._load.done():
            raise StateError(f"adapter {self._spec.name} is still being written: it keeps its slots")
        self._slots.release(self._numbers)

    def _write(self, feed: EngineFeed, writer: _Writer, attempt: int, timeout_s: float) -> Loaded:
        with self._on_device(), naming_load(self._engine, self._rank):
            writer.begin(None)  # slots are allocated once, when the engine starts
            return Loaded(feed.receive(attempt, writer, timeout_s), feed.spans)

    def _on_device(self) -> AbstractContextManager[None]:
        """Return a context in which this thread uses the rank's device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _disconnect(self) -> None:
        self._writers = {}
        if self._feed is not None:
            self._feed.close()
            self._feed = None


class AdapterRanks:
    """The `AdapterRank` of each adapter, by the adapter's slots."""

    def __init__(self, rank: int, slots: AdapterSlots | None) -> None:
        self._rank, self._slots = rank, slots
        self._adapters: dict[tuple[int, ...], AdapterRank] = {}

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
