"""vLLM behind its public hooks: a worker extension and ``collective_rpc``."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsync.engines.base import Rollout
from weightsync.engines.checks import warn_untested
from weightsync.engines.ranks import RankProcess, RankWatch
from weightsync.engines.sampling import Sampling
from weightsync.engines.vllm_api import engine_args, sampling_params, set_environment, start, stop
from weightsync.engines.vllm_loop import EngineLoop
from weightsync.engines.vllm_worker import WeightSyncWorker
from weightsync.errors import EngineError, StateError, WeightSyncError
from weightsync.faults import arm, shares

if TYPE_CHECKING:
    from weightsync.buffers import Attached
    from weightsync.clock import Span
    from weightsync.engines.vllm_loop import Steppable
    from weightsync.faults import Fault
    from weightsync.feed import FeedTicket
    from weightsync.plan import Plan, RankLayout
    from weightsync.verify import Digests

__all__ = ["VllmEngine"]

logger = logging.getLogger("weightsync.engines.vllm")

_END_S = 20.0
"""For vLLM to end by itself; it gives its workers about ten seconds."""


class VllmEngine:
    """One vLLM engine. With one rank, engine and worker live in this process; further ranks have their own.

    `options` are arguments of vLLM's ``EngineArgs``, but for those that `vllm_api` fixes. ``dtype`` is
    by default the one that the model's config names, float32 too.

    Raises:
        ConfigError: an option that vLLM has not, a dtype that its platform cannot hold, or more ranks than
            GPUs; named as ``options.<field>``.
    """

    def __init__(self, model_path: str, name: str, options: Mapping[str, Any]) -> None:
        """Start vLLM with the model's config and dummy weights."""
        self._name = name
        self._whole = False
        self._spans: list[Sequence[Span]] = []
        warn_untested("vllm")
        set_environment()
        worker = f"{WeightSyncWorker.__module__}.{WeightSyncWorker.__qualname__}"
        arguments = engine_args(model_path, options, worker)
        self._loop = EngineLoop(name, lambda: start(arguments), _stop)
        ranks: list[RankProcess | None] = self._on_ranks("join", os.getpid())
        self._num_ranks = len(ranks)
        self._watch = RankWatch(name, [rank for rank in ranks if rank], self._loop.fail)

    def check(self) -> None:
        """See `Engine.check`."""
        self._loop.require_ranks()

    def arm(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """See `Engine.arm`."""
        here, ranks = shares(faults, self._num_ranks)
        if self._num_ranks > 1:
            self._on_ranks("arm", who, ranks, seed)
        if here or not faults:
            arm(who, here, seed)

    def layout(self) -> Sequence[RankLayout]:
        """See `Engine.layout`. A rank without buffers takes whole tensors: vLLM's loader cuts its shard."""
        layouts: list[RankLayout] = self._on_ranks("layout")
        if len({bool(layout.buffers) for layout in layouts}) > 1:
            # Digests of shards and of whole tensors do not add up to one another.
            logger.warning("engine %s reloads on all ranks: not all can be written live", self._name)
            layouts = self._on_ranks("reload")
        return layouts

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """See `Engine.attach`."""
        return self._on_ranks("attach", plan, tuple(tickets), timeout_s)

    def pause(self, mode: str, timeout_s: float) -> None:
        """See `Engine.pause`."""
        self._loop.freeze(mode, timeout_s)
        self._on_ranks("settle")

    def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]:
        """See `Engine.load`; where vLLM reloads, the digests are of the tensors handed to its loader."""
        if not self._loop.frozen:
            raise StateError(f"engine {self._name} is serving: pause it first")
        self._whole = False
        try:
            loaded = self._on_ranks("load", attempt, timeout_s)
        except WeightSyncError:
            self._loop.void()
            raise
        self._whole = True
        self._spans = [spans for _, spans in loaded]
        return [digests for digests, _ in loaded]

    def spans(self) -> Sequence[Sequence[Span]]:
        """See `Engine.spans`."""
        return self._spans

    def resume(self, version: int) -> None:
        """See `Engine.resume`. Raises StateError while the weights are dummies or a mix."""
        if not self._whole:
            raise StateError(f"engine {self._name} has no whole weights: load them first")
        self._loop.thaw(version)

    def serving(self) -> int:
        """See `Engine.serving`."""
        return self._loop.serving

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Rollout:
        """See `Engine.generate`; requests of concurrent calls share vLLM's batches."""
        settings = Sampling.of(sampling)
        params = [sampling_params(settings, index) for index in range(len(prompts))]
        return Rollout.of(self._loop.complete(prompts, params))

    def close(self) -> None:
        """See `Engine.close`."""
        self._watch.close()
        if self._loop.is_lost or not self._loop.close(_END_S):
            self._watch.end()  # or vLLM would wait for what a rank that is stopped should answer
            if not self._loop.close(_END_S):
                logger.warning("engine %s does not end", self._name)

    def _on_ranks(self, method: str, *args: object) -> list[Any]:
        # Bytes of our own pickling pass between vLLM's processes without its insecure mode.
        blob = pickle.dumps((method, args))
        try:
            replies = self._loop.call(lambda engine: engine.collective_rpc("ws_call", args=(blob,)))
        except WeightSyncError:
            raise
        except Exception as error:  # whatever vLLM raises where a worker's process is gone
            raise EngineError(self._name, method, f"{type(error).__name__}: {error}") from error
        outcomes = [pickle.loads(reply) for reply in replies]
        for outcome in outcomes:
            if isinstance(outcome, WeightSyncError):
                raise outcome
        return outcomes


def _stop(engine: Steppable) -> None:
    try:
        engine.collective_rpc("ws_call", args=(pickle.dumps(("close", ())),))
    except Exception as error:  # noqa: BLE001 - a dead worker has nothing left to close
        logger.warning("not all ranks were closed: %s", error)
    finally:
        stop(engine)
