"""The engine's actor: an engine adapter behind awaitable methods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from weightsync.actors.engine_calls import EngineCalls
from weightsync.engines import CountsDrafts, DraftCounts, Generates, Rollout, choose_engine, make_engine
from weightsync.engines.base import Prompts
from weightsync.engines.serving.sampling import check_prompts


class EngineActor(EngineCalls):
    """An actor that starts and drives one inference engine.

    All methods are coroutines, so that requests and updates can overlap.

    Args:
        kind: ``vllm``, ``sglang``, ``torch`` (transformers), ``auto``, or the path of a class of your own,
            ``package.module:Class``, see docs/extending.md.
        model_path: a Hugging Face model folder; config and tokenizer are read, weights are not.
        name: the name under which the engine is registered with WeightSync.
        options: passed to the engine, see `weightsync/engines/README.md`.
        slot: on a CPU host, the name of the engine's slot; rank r > 0 has ``<slot>.<r>``. The engine shares a
            holder with the trainer of the same slot. On GPUs, ranks on the same GPU share a holder.
    """

    _engine: Generates

    def __init__(
        self,
        kind: str,
        model_path: str,
        name: str,
        options: Mapping[str, Any] | None = None,
        slot: str | None = None,
    ) -> None:
        self._kind, self._why = choose_engine(kind)
        self._slot, self._name = slot, name
        self._engine = make_engine(self._kind, model_path, name, options or {})

    def __repr__(self) -> str:
        """Return the prefix that Ray writes before each log line."""
        return f"{type(self).__name__} {self._name}".rstrip()

    async def info(self) -> dict[str, str]:
        """Return the ``kind`` of engine and ``why`` it was chosen."""
        return {"kind": self._kind, "why": self._why}

    async def generate(self, prompts: Prompts, sampling: Mapping[str, Any]) -> Rollout:
        """Complete prompts: lists of token ids, or texts if the model's folder has a tokenizer.

        `sampling` has the fields of `Sampling`, such as ``max_tokens`` and ``stop_token_ids``. Other settings
        are passed to the engine, under the engine's names: an argument of vLLM's ``SamplingParams``, a key of
        SGLang's sampling dictionary, or a field of transformers' ``GenerationConfig``. Without settings, the
        whole distribution is drawn from, and the model's own end tokens end nothing.

        docs/guide.md lists settings and the fields of a rollout. Raises ConfigError for a setting that nobody
        knows, and for a text without a tokenizer; see also `Generates.generate`.
        """
        check_prompts(prompts)
        return await asyncio.to_thread(self._engine.generate, prompts, sampling)

    async def draft_counts(self) -> DraftCounts | None:
        """Return how many tokens were drafted and accepted since the engine started.

        None for an engine that does not speculate, or does not count: vLLM does.
        """
        if not isinstance(self._engine, CountsDrafts):
            return None
        return await asyncio.to_thread(self._engine.draft_counts)

    async def close(self) -> None:
        """End the engine."""
        await asyncio.to_thread(self._engine.close)
