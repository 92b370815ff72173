"""One adapter of an engine, which is updated like a separate engine."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weightsync.errors import ConfigError, DeadlineError, StateError
from weightsync.plan import Plan
from weightsync.plan.layout.layout_table import LayoutTable, unpack_names
from weightsync.protocol.adapters import LORA_A, LORA_B, AdapterSpec
from weightsync.protocol.messages import Attached, FeedTicket, Loaded

_POLL_S = 0.005
_END_S = 60.0
"""Time for requests and a load to end when an adapter is closed."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A version of an adapter that requests can use: the engine's number of the slot, and the version."""

    number: int
    version: int


class AdapterEngine:
    """An `Engine` that writes the adapter slots of another while that one serves.

    A version is written to the slot that serves none. Requests that begin after `resume` use it. Those that
    run keep the version with which they began, in the other slot.

    Attributes:
        numbers: the engine's numbers of the slots.
    """

    def __init__(
        self,
        engine: str,
        spec: AdapterSpec,
        numbers: tuple[int, int],
        on_ranks: Callable[..., list[Any]],
        announce: Callable[[ServedAdapter | None], None] = lambda _: None,
    ) -> None:
        """
        Args:
            on_ranks: calls a method of `AdapterRank` on each rank of engine `engine`.
            announce: is told of the version that requests use from now on, and of None at the end. A request
                within `use` may be told too early: the slot that it uses then is written after it ends.
        """
        self._name, self._spec, self.numbers, self._on_ranks = engine, spec, numbers, on_ranks
        self._announce, self._changed = announce, threading.Condition()
        self._running: Counter[int] = Counter()
        self._served: ServedAdapter | None = None
        self._written = self._attempt = 0
        self._loading = self._closed = False

    def layout(self) -> Sequence[LayoutTable]:
        """Return the layout of each rank, in the tensors' names of the spec.

        Raises ConfigError for a tensor that no rank has a slot for.
        """
        ranks: list[LayoutTable] = self._on_ranks("layout")
        held = {meta.name for each in ranks for meta in each.tensors.metas(unpack_names(each.names))}
        if left := next((meta.name for meta in self._spec.tensors if meta.name not in held), ""):
            module = left.removesuffix(LORA_A).removesuffix(LORA_B)
            remedy = (
                f"engine {self._name} has no slot for {left}: leave {module} out of the adapter, "
                "or send merged weights (merge=)"
            )
            raise ConfigError("adapter", self._spec.name, remedy)
        return ranks

    def can_export(self) -> Sequence[bool]:
        """Return for each rank whether holders on GPUs can write it."""
        return self._on_ranks("can_export")

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """Connect all ranks to their holders."""
        return self._on_ranks("attach", plan, tuple(tickets), timeout_s)

    def pause(self, mode: str, timeout_s: float) -> None:
        """Wait until the slot that is written next is used by no request. All modes are alike.

        Raises DeadlineError.
        """
        with self._changed:
            self._written = 0
            self._wait_unused((self._next,), "pause", timeout_s)

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        """Write one attempt's buckets to the slot that serves no version. Returns digests of the slot."""
        self.pause("", timeout_s)
        with self._load():
            number, self._attempt = self._next, attempt
            loaded = self._outcomes(self._on_ranks("begin", number, attempt, timeout_s), timeout_s)
            with self._changed:
                if attempt != self._attempt:  # the driver gave this one up, and the outcomes are of that one
                    raise StateError(f"a later load of adapter {self._spec.name} began")
                self._written = number
            return loaded

    @contextmanager
    def _load(self) -> Iterator[None]:
        """Have `close` wait until this load is over."""
        with self._changed:
            self._require_open()
            self._loading = True
        try:
            yield
        finally:
            with self._changed:
                self._loading = False
                self._changed.notify_all()

    def _outcomes(self, loaded: Sequence[Loaded | None], timeout_s: float) -> Sequence[Loaded]:
        """Wait for each rank. The engine makes tokens between two looks at them."""
        deadline = time.monotonic() + timeout_s
        while None in loaded:
            if time.monotonic() > deadline:
                late = [f"engine {self._name} rank {i}" for i, each in enumerate(loaded) if each is None]
                raise DeadlineError(f"load of adapter {self._spec.name}", late, timeout_s)
            self._require_open()
            time.sleep(_POLL_S)
            loaded = self._on_ranks("outcome")
        return [each for each in loaded if each is not None]

    def resume(self, version: int) -> None:
        """Have new requests use the weights written since the last `pause`, as `version`.

        Raises StateError if nothing was written, unless requests already use `version`.
        """
        with self._changed:
            if self._written:
                served = ServedAdapter(self._written, version)
                self._announce(served)  # first: a request that begins now counts for the slot before
                self._served, self._written = served, 0
            elif version != self.serving():
                raise StateError(f"adapter {self._spec.name} of engine {self._name} was not written")

    def serving(self) -> int:
        """Return the version that new requests use; 0 before the first."""
        return self._served.version if self._served else 0

    @contextmanager
    def use(self) -> Iterator[ServedAdapter]:
        """Keep the current version in its slot during the context. Raises StateError without a version."""
        with self._changed:
            self._require_open()
            served = self._served
            if served is None:
                why = "has no version yet: update_adapter() comes first"
                raise StateError(f"adapter {self._spec.name} of engine {self._name} {why}")
            self._running[served.number] += 1
        try:
            yield served
        finally:
            with self._changed:
                self._running[served.number] -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float = _END_S) -> None:
        """Refuse requests, wait for running requests and for a load, and give the slots back.

        Safe to call twice. Raises DeadlineError; the slots then stay taken, since a request without its slot
        would end the engine.
        """
        with self._changed:
            self._closed = True
            self._announce(None)
            self._wait_unused(self.numbers, "close", timeout_s)
            if not self._changed.wait_for(lambda: not self._loading, timeout_s):
                raise DeadlineError("close", (f"a load of adapter {self._spec.name}",), timeout_s)
        self._on_ranks("close")

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"adapter {self._spec.name} of engine {self._name} is closed")

    def _wait_unused(self, numbers: Sequence[int], phase: str, timeout_s: float) -> None:
        def used() -> int:
            return sum(self._running[number] for number in numbers)

        if not self._changed.wait_for(lambda: not used(), timeout_s):
            calls = f"{used()} calls of generate that use adapter {self._spec.name} as it was"
            raise DeadlineError(phase, (f"engine {self._name}: {calls}",), timeout_s)

    @property
    def _next(self) -> int:
        """The number of the slot that is written next."""
        first, second = self.numbers
        return second if self._served and self._served.number == first else first
