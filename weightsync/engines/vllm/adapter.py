"""Adapter of vLLM by public hooks: a worker extension and ``collective_rpc``."""

from __future__ import annotations

import logging
import os
import pickle
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from weightsync.config import PrefixCache
from weightsync.engines.base import DraftCounts
from weightsync.engines.lora.adapter_engine import ServedAdapter
from weightsync.engines.lora.slot_serving import SlotServing
from weightsync.engines.rank.rank_process import RankProcess, RankWatch
from weightsync.engines.serving.checks import check_version
from weightsync.engines.serving.engine_ranks import CACHES, WEIGHTS, EngineRanks, answers_of
from weightsync.engines.serving.request_loop import Params, RequestLoop
from weightsync.engines.serving.sampling import Sampling
from weightsync.engines.vllm.api import (
    engine_args,
    require_core_here,
    sampling_params,
    set_environment,
    start,
    stop,
)
from weightsync.engines.vllm.lora import Adapted, adapted, require_no_sleep
from weightsync.engines.vllm.stepper import Stepper, draft_counts
from weightsync.protocol.adapters import AdapterSpec

T = TypeVar("T")


class VllmRanks(EngineRanks):
    """Base class of vLLM adapters. Subclasses reach the workers with `_ask`."""

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        """Call `method` of `Rank` on each rank. Raises EngineError if vLLM could not call all of them."""
        # vLLM passes bytes between processes without its insecure mode, so pickle here.
        blob = pickle.dumps((method, args))
        with self._naming(method):
            replies = self._ask(blob)
        return answers_of(pickle.loads(reply) for reply in replies)

    @abstractmethod
    def _ask(self, blob: bytes) -> Sequence[bytes]:
        """Call every rank's worker with `blob`; return all replies."""


logger = logging.getLogger("weightsync.engines.vllm")

_END_S = 20.0
"""Time for vLLM to end by itself; vLLM gives workers about ten seconds."""


class VllmEngine(SlotServing, VllmRanks):
    """One vLLM engine. A single rank runs in this process; several ranks have their own processes.

    `options` are arguments of vLLM's ``EngineArgs``, except arguments that `vllm.api` fixes. ``dtype``
    defaults to the dtype in the model's config, also float32.

    Raises:
        ConfigError: an option that vLLM does not have, a dtype that its platform cannot hold, or more ranks
            than GPUs; named as ``options.<field>``.
    """

    _apart = False

    def __init__(self, model_path: str, name: str, options: Mapping[str, Any]) -> None:
        """Start vLLM with the model's config and dummy weights."""
        super().__init__(name)
        check_version("vllm")
        set_environment()
        require_core_here()
        worker = "weightsync.WeightSyncWorker"
        arguments = engine_args(model_path, options, worker)
        self._sleeps = arguments.enable_sleep_mode
        self.loop = RequestLoop(name, lambda: Stepper(start(arguments)), _stop)
        ranks: list[RankProcess | None] = self.on_ranks("join", os.getpid())
        self._num_ranks = len(ranks)
        self.watch = RankWatch(name, [rank for rank in ranks if rank], self.loop.thread.fail)

    def use_prefix_cache(self, treatment: PrefixCache) -> None:
        """Treat cached prefixes so, see `CachesPrefixes.use_prefix_cache`."""
        self._prefix_cache = treatment

    def call(self, work: Callable[[Any], T]) -> T:
        """Run `work` with vLLM's LLMEngine between two steps, on the thread that owns it.

        It may add requests. These have no salt, so it must not while `SyncConfig.prefix_cache` is ``salt``.
        """
        self.loop.has_cached = True
        return self._call(work)

    def _call(self, work: Callable[[Any], T]) -> T:
        async def between_steps(stepper: Stepper) -> T:
            return work(stepper.engine)

        return self.loop.call(between_steps)

    def draft_counts(self) -> DraftCounts | None:
        """Return counts of drafted tokens, see `CountsDrafts.draft_counts`."""
        return self._call(draft_counts)

    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop making tokens, see `Engine.pause`."""
        self.loop.freeze(mode, timeout_s)
        self._wake(WEIGHTS)
        self.on_ranks("settle")

    def resume(self, version: int) -> None:
        """Serve `version`. Raises StateError while the weights are dummies or a mix."""
        self.require_whole()
        self._wake(WEIGHTS, CACHES)
        self._serve(version)

    def _take_slots(self, spec: AdapterSpec, numbers: Sequence[int]) -> None:
        require_no_sleep(self._sleeps)

    def _adapted(self, name: str, served: ServedAdapter, settings: object) -> Adapted:
        return adapted(name, served.version, served.number, settings)

    def close(self) -> None:
        """End vLLM and all its processes. Safe to call twice."""
        self.watch.close()
        if self.loop.thread.is_lost or not self.loop.thread.close(_END_S):
            self.watch.end()  # else vLLM would wait for the answer of a stopped rank
            if not self.loop.thread.close(_END_S):
                logger.warning("[engine %s] does not end", self._name)

    def _params(self, settings: Sampling, index: int) -> Params:
        return Params(sampling_params(settings, index))

    def _sleep_option(self, level: int) -> tuple[str, bool]:
        return "options.enable_sleep_mode", self._sleeps

    def _release(self, level: int) -> None:
        self._call(lambda engine: engine.sleep(level, "keep"))

    def _allocate(self, part: str) -> None:
        self._call(lambda engine: engine.wake_up([part]))

    def _ask(self, blob: bytes) -> Sequence[bytes]:
        return self._call(lambda engine: engine.collective_rpc("ws_call", args=(blob,)))


def _stop(stepper: Stepper) -> None:
    engine = stepper.release()
    try:
        engine.collective_rpc("ws_call", args=(pickle.dumps(("close", ())),))
    except Exception as error:  # noqa: BLE001 - a dead worker has nothing left to close
        logger.warning("not all ranks were closed: %s", error)
    finally:
        stop(engine)
