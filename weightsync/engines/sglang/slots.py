"""Base class of SGLang's adapters, which has SGLang keep slots for LoRA adapters."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.engines.lora.adapter_places import passes
from weightsync.engines.lora.slot_engine import SlotEngine
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.sglang.api import sampling_params
from weightsync.engines.sglang.lora import Adapted, SlotOptions, coordinates, ones, peft_config, slot_name
from weightsync.engines.sglang.ranks import SglangRanks
from weightsync.errors import ConfigError
from weightsync.protocol.adapters import AdapterSpec


class SglangSlots(SlotEngine, SglangRanks):
    """Subclasses answer a request with `_run`."""

    _slots: SlotOptions
    _seeds = False
    """Whether SGLang draws by seeds."""

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
