"""One rank's side of an adapter: two slots, of which one serves while the other is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from weightsync.channel.engine_end import EngineFeed
from weightsync.engines.live_writer import LiveWriter
from weightsync.errors import DeadlineError, EngineError, StateError, WeightSyncError
from weightsync.plan import Plan, RankLayout
from weightsync.protocol.adapters import AdapterSpec
from weightsync.protocol.handles import Attached
from weightsync.protocol.messages import FeedTicket, Loaded


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory of an engine for one version of an adapter.

    Attributes:
        number: what the engine calls it.
        layout: which boxes of the adapter's tensors are where in `live`. The slot has zeros elsewhere.
        live: tensors of the slot, uint8 or any other type, by the names of the layout's buffers.
    """

    number: int
    layout: RankLayout
    live: Mapping[str, torch.Tensor]


class AdapterSlots(Protocol):
    """The adapter slots of one rank of an engine."""

    def reserve(self, spec: AdapterSpec, numbers: Sequence[int]) -> Sequence[Slot]:
        """Take a slot for each of `numbers`, all alike. Raises ConfigError if there are too few."""

    def release(self, numbers: Sequence[int]) -> None:
        """Give the slots back."""


class AdapterRank:
    """One adapter in one rank. A slot is written by a thread, so that the engine makes tokens meanwhile."""

    def __init__(self, rank: int, spec: AdapterSpec, numbers: Sequence[int], slots: AdapterSlots) -> None:
        """Reserve the slots. Raises as `AdapterSlots.reserve`."""
        self._rank, self._spec, self._slots = rank, spec, slots
        self._held = {slot.number: slot for slot in slots.reserve(spec, numbers)}
        self._feed: EngineFeed | None = None
        self._writers: dict[int, LiveWriter] = {}
        self._thread: threading.Thread | None = None
        self._outcome: Loaded | WeightSyncError | None = None

    def layout(self) -> RankLayout:
        """Return the boxes of the adapter's tensors that this rank serves."""
        return next(iter(self._held.values())).layout

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Attached:
        """Connect to the holder. `tickets` has all ranks'."""
        self._disconnect()
        self._feed = feed = EngineFeed.open(tickets[self._rank], plan, timeout_s)
        self._writers = {
            number: LiveWriter(plan, slot.layout, slot.live, feed.slots, views=feed.views)
            for number, slot in self._held.items()
        }
        return Attached(plan.digest(), None)

    def begin(self, number: int, attempt: int, timeout_s: float) -> None:
        """Start to write slot `number`, which no request may use, with one attempt's buckets.

        Raises StateError before `attach`, DeadlineError if an earlier attempt does not end.
        """
        if self._feed is None:
            raise StateError(f"adapter {self._spec.name} is not attached: connect first")
        if self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineError(f"load of adapter {self._spec.name}", (f"rank {self._rank}",), timeout_s)
        writer, self._outcome = self._writers[number], None
        arguments = self._feed, writer, attempt, timeout_s
        self._thread = threading.Thread(
            target=self._write, args=arguments, daemon=True, name=f"adapter-{self._spec.name}"
        )
        self._thread.start()

    def outcome(self, wait_s: float) -> Loaded | None:
        """Return what the slot holds, or None while it is being written. Raises what ended that early."""
        if self._thread:
            self._thread.join(wait_s)
        if isinstance(self._outcome, WeightSyncError):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        """Disconnect, and give the slots back."""
        self._disconnect()
        self._slots.release(tuple(self._held))

    def _write(self, feed: EngineFeed, writer: LiveWriter, attempt: int, timeout_s: float) -> None:
        try:
            with self._on_device():
                writer.begin(None)  # slots are allocated once, when the engine starts
                self._outcome = Loaded(feed.receive(attempt, writer, timeout_s), feed.spans)
        except WeightSyncError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001 - the driver has to get it
            self._outcome = EngineError(
                self._spec.name, "load", f"{type(error).__name__}: {error}", self._rank
            )

    def _on_device(self) -> AbstractContextManager[None]:
        """Return a context in which this thread, which is new, uses the rank's device."""
        device = next(tensor.device for slot in self._held.values() for tensor in slot.live.values())
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _disconnect(self) -> None:
        self._writers = {}
        if self._feed is not None:
            self._feed.close()
            self._feed = None
