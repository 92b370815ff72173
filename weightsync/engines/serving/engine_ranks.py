"""The part that all adapters share, which calls a `Rank` in each rank's process."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weightsync.config import Components
from weightsync.errors import ConfigError, EngineError, StateError, WeightSyncError
from weightsync.faults import Fault, set_faults, split_by_rank
from weightsync.plan import Plan
from weightsync.plan.layout.arrangement import Experts
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.log_level import used_log_level
from weightsync.protocol.messages import Attached, FeedTicket, Loaded

logger = logging.getLogger("weightsync.engines")

WEIGHTS, CACHES = "weights", "kv_cache"
"""Parts of memory that sleep, by the names of vLLM and SGLang, in the order in which they wake."""


def answers_of(outcomes: Iterable[Any]) -> list[Any]:
    """Return the answers of all ranks. Raises the first WeightSyncError among them."""
    answers = list(outcomes)
    for answer in answers:
        if isinstance(answer, WeightSyncError):
            raise answer
    return answers


class EngineRanks(ABC):
    """Base class of adapters. Subclasses call their ranks with `on_ranks`.

    Live parameters keep their addresses while they sleep, so layouts stay valid.
    """

    _num_ranks = 0
    _apart = True
    """True if a single rank runs in a separate process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asleep: list[str] = []
        self._whole = self._has_draft = self._moves_experts = False
        self._num_loads = 0

    @abstractmethod
    def on_ranks(self, method: str, *args: object) -> list[Any]:
        """Call `method` of `Rank` on each rank. Raises a rank's first WeightSyncError, or EngineError."""

    def use_components(self, components: Components) -> None:
        """Treat a draft as `components` says, see `HasComponents.use_components`."""
        self.on_ranks("treat", components.get("draft"))

    def layout(self) -> Sequence[LayoutTable]:
        """Return the layout of each rank. Ranks without buffers take whole tensors through their loader."""
        layouts: list[LayoutTable] = self.on_ranks("layout")
        if len({len(layout.buffers) > 0 for layout in layouts}) > 1:
            # Digests of shards and of whole tensors do not add up to one another.
            logger.warning("[engine %s] loads whole tensors: not all ranks can be written live", self._name)
            layouts = self.on_ranks("reload")
        self._has_draft = any(layout.draft for layout in layouts)
        self._moves_experts = any(layout.arrangement for layout in layouts)
        return layouts

    def can_export(self) -> Sequence[bool]:
        """Return for each rank whether `attach` would export live memory now."""
        return [each is not None for each in self.export()]

    def export(self) -> Sequence[DeviceMemory | None]:
        """Return for each rank the live memory that `attach` would export now."""
        return self.on_ranks("export", WEIGHTS in self._asleep)

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """Connect all ranks to their holders. Ranks log from this process's level on."""
        if (level := used_log_level()) and (self._apart or self._num_ranks > 1):
            self.on_ranks("use_log_level", level)
        return self.on_ranks("attach", plan, tuple(tickets), timeout_s, WEIGHTS in self._asleep)

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        """Load one attempt's buckets. Digests of whole tensors are of the loader's input."""
        self.require_awake("pause it first")
        self._whole = False
        self._num_loads = number = self._num_loads + 1
        loaded: list[Loaded] = self.on_ranks("load", attempt, timeout_s)
        self._whole = number == self._num_loads  # else it was given up, and another one writes
        return loaded

    def experts(self) -> Experts:
        """Return the expert in each slot of all ranks, see `MovesExperts.experts`."""
        found: list[Experts] = self.on_ranks("experts") if self._moves_experts else [()]
        if any(each != found[0] for each in found):
            raise EngineError(self._name, "layout", "its ranks disagree which expert is in which slot")
        return found[0]

    def move_experts(self, experts: Experts) -> None:
        """Rearrange the live experts, see `MovesExperts.move_experts`."""
        self.require_awake("update or wake it first")
        self._whole = False
        self.on_ranks("move_experts", experts)

    def live_digests(self) -> Sequence[Loaded]:
        """Digest the live memory, see `MovesExperts.live_digests`."""
        digests: list[Loaded] = self.on_ranks("live_digests")
        self._whole = True
        return digests

    def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set each process's part of `faults`."""
        apart = self._apart or self._num_ranks > 1
        here, ranks = split_by_rank(faults, self._num_ranks, apart)
        if apart:
            self.on_ranks("set_faults", process, ranks, seed)
        if here or not faults:
            set_faults(process, here, seed)

    @abstractmethod
    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop making tokens, see `Engine.pause`."""

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then release the memory of weights and caches, see `Sleeps.sleep`."""
        field, needed = self._sleep_option(level)
        if not needed:
            raise ConfigError(
                field, False, f"engine {self._name} can sleep (level {level}) if started with true"
            )
        if level > 1 and self._has_draft:
            remedy = "give 1: level 2 drops the draft, or buffers of it, and no update brings them back"
            raise ConfigError("level", level, remedy)
        if level > 1 and self._moves_experts:
            remedy = "give 1: level 2 drops the map of the experts that moved"
            raise ConfigError("level", level, remedy)
        if WEIGHTS in self._asleep:
            return
        self.pause(mode, timeout_s)
        self._wake_to_sleep()
        with self._naming("sleep"):
            self._release(level)
        self._asleep = [WEIGHTS, CACHES]
        self._whole = self._whole and level == 1

    def _wake_to_sleep(self) -> None:
        """Wake fully, since vLLM may ignore a sleep call while it is half awake."""
        self._wake(CACHES)

    def require_awake(self, remedy: str) -> None:
        """Raise StateError while weights are asleep."""
        if WEIGHTS in self._asleep:
            raise StateError(f"engine {self._name} is asleep: {remedy}")

    def _wake(self, *parts: str) -> None:
        """Allocate the memory of those `parts` that are asleep."""
        for part in [each for each in self._asleep if each in parts]:
            with self._naming("wake"):
                self._allocate(part)
            self._asleep.remove(part)
            if part == WEIGHTS and not self._whole:
                self.on_ranks("blank")

    @contextlib.contextmanager
    def _naming(self, phase: str, *others: type[Exception]) -> Iterator[None]:
        """Turn errors of vLLM or SGLang into an EngineError. Ours and `others` stay as they are."""
        try:
            yield
        except Exception as error:  # any error of vLLM or SGLang, such as a lack of memory
            if isinstance(error, (WeightSyncError, *others)):
                raise
            raise EngineError(self._name, phase, f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def _sleep_option(self, level: int) -> tuple[str, bool]:
        """Return the option that an engine needs to sleep, and whether it was set."""

    @abstractmethod
    def _release(self, level: int) -> None:
        """Release all memory. Called while paused."""

    @abstractmethod
    def _allocate(self, part: str) -> None:
        """Allocate one part again."""

    def require_whole(self) -> None:
        """Raise StateError while the weights are dummies or a mix."""
        if not self._whole:
            raise StateError(f"engine {self._name} has no whole weights: load them first")
