"""Base class of SGLang's adapters: calls the ranks through SGLang's weight loader, and has slots for LoRA."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch

from weightsync.config import PrefixCache
from weightsync.engines.lora.adapter_places import passes
from weightsync.engines.lora.slot_engine import SlotEngine
from weightsync.engines.rank.rank_process import RankProcess
from weightsync.engines.serving.checks import refuse_salt
from weightsync.engines.serving.engine_ranks import CACHES, WEIGHTS, answers_of
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.sglang.api import Manager, pack, sampling_params
from weightsync.engines.sglang.lora import Adapted, SlotOptions, coordinates, ones, peft_config, slot_name
from weightsync.engines.sglang.rank_calls import Replies
from weightsync.engines.sglang.worker import RankSettings
from weightsync.errors import ConfigError, EngineError
from weightsync.protocol.adapters import AdapterSpec

_ANSWER_S = 10.0
"""Time for answers to arrive after SGLang says that all ranks have sent them."""


class SglangRanks(SlotEngine):
    """Subclasses reach SGLang with `_asked`, and answer a request with `_run`."""

    _settings: RankSettings
    _replies: Replies
    _slots: SlotOptions
    _seeds = False
    """Whether SGLang draws by seeds."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._asking = threading.Lock()

    def use_prefix_cache(self, treatment: PrefixCache) -> None:
        """Raise ConfigError for ``salt``: a pause of SGLang retracts requests, which are computed again."""
        refuse_salt(treatment, self._name, "SGLang computes paused requests again")

    def _join(self) -> list[RankProcess | None]:
        """Make the ranks, and connect them. Returns their processes."""
        found = self.on_ranks("join", os.getpid())
        self._replies.connected()
        return found

    def on_ranks(self, method: str, *args: object, wait_s: float | None = None) -> list[Any]:
        """Call `method` of `Rank` on each rank. Raises FutureTimeoutError after `wait_s` seconds."""
        with self._asking:
            has_draft = self._settings.speculation is not None and method == "join"
            for to_draft in (True, False) if has_draft else (False,):
                calls = self._replies.calls(self._settings, method, pack(args), to_draft)
                self._asked(method, methodcaller("on_ranks", calls), wait_s)
            part = str(args[2]) if method == "adapter" else ""
            return answers_of(self._replies.collect(calls, _ANSWER_S, part))

    @abstractmethod
    def _asked(
        self, method: str, work: Callable[[Manager], Coroutine[Any, Any, Any]], wait_s: float | None = None
    ) -> Any:  # noqa: ANN401 - SGLang's
        """Await `work` while no request is stepped. Raises EngineError and FutureTimeoutError."""

    def _release(self, level: int) -> None:
        tags = {"tags": [WEIGHTS, CACHES]}
        self._own("release_memory_occupation", "ReleaseMemoryOccupationReqInput", tags)

    def _allocate(self, part: str) -> None:
        self._own("resume_memory_occupation", "ResumeMemoryOccupationReqInput", {"tags": [part]})

    def _own(self, method: str, request: str, fields: Mapping[str, object]) -> Any:  # noqa: ANN401 - SGLang's
        outcome = self._asked(method, methodcaller("ask", method, request, **fields))
        if isinstance(outcome, tuple) and not outcome[0]:
            raise EngineError(self._name, method, str(outcome[1]))
        return outcome

    def _take_slots(self, spec: AdapterSpec, numbers: Sequence[int]) -> None:
        """Find where SGLang's loader puts the adapter's elements, and have it keep a slot for each number."""
        self._slots.require(spec, len(self._adapters))
        self.on_ranks("call_slots", "require", (spec,))
        config = peft_config(spec)
        for axis, base in passes(spec):
            probe = slot_name(spec.name, axis)
            try:
                self._fill_slot(probe, config, coordinates(spec, axis, base), pinned=False)
                self.on_ranks("call_slots", "see", (spec, axis, base))
            finally:
                self._drop(probe)
        with contextlib.ExitStack() as if_it_fails:
            for number in numbers:
                name = slot_name(spec.name, number)
                if_it_fails.callback(self._drop, name)
                self._fill_slot(name, config, ones(spec), pinned=True)
                self.on_ranks("call_slots", "take", (spec.name, number))
            if_it_fails.pop_all()

    def _fill_slot(
        self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], pinned: bool
    ) -> None:
        """Have SGLang load an adapter into a slot. Raises ConfigError if it refuses."""
        self.on_ranks("call_slots", "look", ())
        refused = self._asked("adapter", lambda server: server.load_lora(name, config, tensors, pinned))
        if refused:
            raise ConfigError("adapter", name, f"SGLang says: {refused}")
        self._run([0], Adapted(sampling_params(Sampling(max_tokens=1), 0, self._seeds), name, name))

    @abstractmethod
    def _run(self, prompt: Sequence[int], settings: Adapted) -> None:
        """Answer a request. While updates pause SGLang, it waits."""

    def _give_slots(self, name: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._drop(slot_name(name, number))

    def _drop(self, name: str) -> None:
        """Have SGLang unload an adapter, if it has loaded it."""
        self._asked("adapter", lambda server: server.unload_lora(name))
