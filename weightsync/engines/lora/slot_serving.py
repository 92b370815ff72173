"""Base class of adapters of engines that keep LoRA adapters in slots."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weightsync.engines.base import Rollout
from weightsync.engines.lora.adapter_engine import AdapterEngine, ServedAdapter
from weightsync.engines.serving.request_loop import Params
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.serving_ranks import ServingRanks
from weightsync.errors import ConfigError, nearest
from weightsync.protocol.adapters import AdapterSpec

_FIRST_SLOT = 1 << 20
"""Adapters that a user loads have smaller numbers."""


class SlotServing(ServingRanks):
    """Opens and closes adapters, and answers requests that name one."""

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

        self._adapters[spec.name] = AdapterEngine(self._name, spec, numbers, on_ranks)
        return self._adapters[spec.name]

    def close_adapter(self, name: str) -> None:
        """Give an adapter's slots back, once no request uses them. Raises DeadlineError if some do."""
        if held := self._adapters.get(name):
            held.close()
            self._adapters.pop(name, None)
            self._give_slots(name, held.numbers)

    def _answer(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Params], settings: Sampling
    ) -> Rollout:
        if not settings.adapter:
            return super()._answer(prompts, params, settings)
        held = self._adapters.get(settings.adapter)
        if held is None:
            raise ConfigError("sampling.adapter", settings.adapter, nearest(settings.adapter, self._adapters))
        with held.use() as served:
            chosen = [
                replace(each, settings=self._adapted(settings.adapter, served, each.settings))
                for each in params
            ]
            made = self.loop.complete(prompts, chosen)
            return Rollout.of(made, settings.adapter, served.version)

    @abstractmethod
    def _take_slots(self, spec: AdapterSpec, numbers: Sequence[int]) -> None:
        """Have the engine reserve slots for `numbers`. Raises ConfigError if it cannot."""

    def _give_slots(self, name: str, numbers: Sequence[int]) -> None:
        """Give the slots back to the engine. Ranks have released them."""

    @abstractmethod
    def _adapted(self, name: str, served: ServedAdapter, settings: Any) -> object:  # noqa: ANN401 - the engine's
        """Return `settings` of a request that adapter `name` answers.

        Prefixes that the engine caches have to be told apart by the version and by the slot's number, which
        is not used twice: an adapter that is registered again may start at version 1 again.
        """
