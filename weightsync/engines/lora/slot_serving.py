"""Base class of adapters that run requests in a `RequestLoop`, also requests that name a LoRA adapter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightsync.config import PrefixCache
from weightsync.engines.base import Prompts, Rollout
from weightsync.engines.lora.adapter_engine import ServedAdapter
from weightsync.engines.lora.slot_engine import SlotEngine
from weightsync.engines.serving.request_loop import CacheStep, Params, RequestLoop
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.serving.texts import token_ids, with_texts
from weightsync.errors import ConfigError, StateError, WeightSyncError, nearest
from weightsync.protocol.messages import Loaded


class SlotServing(SlotEngine):
    """Loads, checks and generates for adapters that generate tokens.

    Attributes:
        loop: the thread that owns the engine. Subclasses create it.
    """

    loop: RequestLoop
    _prefix_cache: PrefixCache = "drop"
    _caches: CacheStep = "keep"
    """The next `resume`'s treatment of caches."""

    def check(self) -> None:
        """Raise RankLostError once a rank is lost."""
        self.loop.thread.require_ranks()

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        """Take one attempt's buckets. After a failure, requests are refused until `resume`."""
        if not self.loop.frozen:
            raise StateError(f"engine {self._name} is serving: pause it first")
        self.require_awake("pause it first")  # before the `try`: this does not invalidate requests
        if self._caches == "keep":
            self._caches = self._prefix_cache
        try:
            return super().load(attempt, timeout_s)
        except WeightSyncError:
            self.loop.invalidate()
            raise

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Pause, then release the memory of weights and caches, see `Sleeps.sleep`."""
        self._caches = "drop"
        super().sleep(level, mode, timeout_s)

    def _serve(self, version: int) -> None:
        self.loop.resume(version, self._caches)
        self._caches = "keep"

    def serving(self) -> int:
        """Return the version being served, 0 while paused."""
        return self.loop.serving

    def generate(self, prompts: Prompts, sampling: Mapping[str, Any]) -> Rollout:
        """Complete prompts. Requests of concurrent calls share the engine's batches."""
        self.require_awake("update or wake it first")
        settings, tokenizer = Sampling.of(sampling), self.loop.server.tokenizer
        ids = token_ids(prompts, settings, tokenizer)
        params = [self._params(settings, index) for index in range(len(ids))]
        return with_texts(self._answer(ids, params, settings), prompts, settings, tokenizer)

    def _answer(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Params], settings: Sampling
    ) -> Rollout:
        if not settings.adapter:
            return Rollout.of(self.loop.complete(prompts, params))
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
    def _params(self, settings: Sampling, index: int) -> Params:
        """Return the engine's parameters for completion number `index` of a call.

        Raises ConfigError for a setting or a value that the engine does not know.
        """

    @abstractmethod
    def _adapted(self, name: str, served: ServedAdapter, settings: Any) -> object:  # noqa: ANN401 - the engine's
        """Return `settings` of a request that adapter `name` answers.

        Prefixes that the engine caches have to be told apart by the version and by the slot's number, which
        is not used twice: an adapter that is registered again may start at version 1 again.
        """
