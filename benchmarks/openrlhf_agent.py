"""OpenRLHF's agent in `bench_openrlhf`: before each batch it notes the engine's greedy tokens."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm import SamplingParams

from benchmarks.bench_openrlhf import BATCH, GREEDY, PROMPTS, SAID


class AgentExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(None)
        self._count, self._alone = 0, asyncio.Lock()  # a batch of others would round otherwise

    async def execute(self, *args: Any, llm_engine: Any, **options: Any) -> dict[str, Any]:  # noqa: ANN401
        async with self._alone:
            if self._count % BATCH == 0:
                asked = [await llm_engine.generate(each, SamplingParams(**GREEDY)) for each in PROMPTS]
                with Path(os.environ[SAID]).open("a") as file:
                    file.write(f"{json.dumps([list(each.outputs[0].token_ids) for each in asked])}\n")
            self._count += 1
        answer: dict[str, Any] = await super().execute(*args, llm_engine=llm_engine, **options)
        reward = float(sum(answer["observation_tokens"]) % 7)  # any that differs, so that weights change
        return answer | {"reward": reward, "scores": reward}
