"""Base class of adapters of engines that answer requests by LoRA adapters in slots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weightsync.engines.base import Rollout
from weightsync.engines.lora.adapter_engine import ServedAdapter
from weightsync.engines.lora.slot_engine import SlotEngine
from weightsync.engines.serving.request_loop import Params
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.serving_ranks import ServingRanks
from weightsync.errors import ConfigError, nearest


class SlotServing(SlotEngine, ServingRanks):
    """Answers requests that name an adapter."""

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
    def _adapted(self, name: str, served: ServedAdapter, settings: Any) -> object:  # noqa: ANN401 - the engine's
        """Return `settings` of a request that adapter `name` answers.

        Prefixes that the engine caches have to be told apart by the version and by the slot's number, which
        is not used twice: an adapter that is registered again may start at version 1 again.
        """
