"""OpenRLHF's agent in rollout actors: writes down the engine's greedy tokens whenever they are others."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm import SamplingParams

from tests.contract.openrlhf_run import GREEDY, PROMPTS


class AgentExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(None)
        self.said: list[list[int]] = []
        self.alone = asyncio.Lock()  # a batch of others would round otherwise

    async def execute(self, *args: Any, llm_engine: Any, **options: Any) -> dict[str, Any]:
        async with self.alone:
            asked = [await llm_engine.generate(each, SamplingParams(**GREEDY)) for each in PROMPTS]
            said = [list(each.outputs[0].token_ids) for each in asked]
            if said != self.said:
                self.said = said
                with Path(os.environ["OPENRLHF_SAID"]).open("a") as file:
                    file.write(f"{json.dumps(said)}\n")
            answer: dict[str, Any] = await super().execute(*args, llm_engine=llm_engine, **options)
        different = float(len(set(answer["observation_tokens"])))
        return answer | {"reward": different, "scores": different}
