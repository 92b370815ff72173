"""Base class of adapters of engines that keep LoRA adapters in slots."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from weightsync.engines.lora.adapter_engine import AdapterEngine, ServedAdapter
from weightsync.engines.serving.engine_ranks import EngineRanks
from weightsync.protocol.adapters import AdapterSpec

_FIRST_SLOT = 1 << 20
"""Adapters that a user loads have smaller numbers."""


class SlotEngine(EngineRanks):
    """Opens and closes adapters, see `weightsync.engines.ServesAdapters`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._adapters: dict[str, AdapterEngine] = {}
        self._slot_numbers = itertools.count(_FIRST_SLOT)

    def open_adapter(self, spec: AdapterSpec) -> AdapterEngine:
        """Take two slots for an adapter, see `ServesAdapters.open_adapter`."""
        self.close_adapter(spec.name)
        numbers = next(self._slot_numbers), next(self._slot_numbers)
        self._take_slots(spec, numbers)

        def on_ranks(method: str, *args: object) -> list[Any]:
            return self.on_ranks("adapter", spec, numbers, method, args)

        announce = partial(self._announce, spec.name)
        self._adapters[spec.name] = AdapterEngine(self._name, spec, numbers, on_ranks, announce)
        return self._adapters[spec.name]

    def close_adapter(self, name: str) -> None:
        """Give an adapter's slots back, once no request uses them. Raises DeadlineError if some do."""
        if held := self._adapters.get(name):
            held.close()
            self._adapters.pop(name, None)
            self._give_slots(name, held.numbers)

    @abstractmethod
    def _take_slots(self, spec: AdapterSpec, numbers: Sequence[int]) -> None:
        """Have the engine reserve slots for `numbers`. Raises ConfigError if it cannot."""

    def _give_slots(self, name: str, numbers: Sequence[int]) -> None:
        """Give the slots back to the engine. Ranks have released them."""

    def _announce(self, name: str, served: ServedAdapter | None) -> None:
        """Have requests that begin later use a version of an adapter, None for none."""
