"""A trainer with a PEFT adapter on a GPU, and a vLLM that also loads adapters from files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import torch

from tests.gpu.vllm_probe import OPTIONS
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


class AdapterTrainer(TrainerShard):
    """One rank, with a base in bfloat16."""

    def start(self, path: str, rank: int, autocast: bool = False) -> None:
        """Load the base, and add an adapter of `rank`, with `autocast` in float32."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda()
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS))
        self.model = get_peft_model(base, config, autocast_adapter_dtype=autocast)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Give the adapter other weights."""
        draw = torch.Generator(device="cuda").manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.05, generator=draw)

    def save(self, folder: str) -> None:
        """Save the adapter as PEFT does."""
        self.model.save_pretrained(folder)


class AdapterEngine(EngineActor):
    """A vLLM with CUDA graphs and adapter slots, started with dummy weights."""

    def __init__(self, path: str, name: str, num_ranks: int, rank: int) -> None:
        slots = {"enable_lora": True, "max_loras": 3, "max_lora_rank": rank}
        super().__init__("vllm", path, name, {"tensor_parallel_size": num_ranks, **OPTIONS, **slots})

    async def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    async def by_file(
        self, folder: str, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[list[int]]:
        """Return what vLLM answers once its own loader has read an adapter from files."""

        def ask(llm: Any) -> list[list[int]]:
            from vllm import SamplingParams
            from vllm.lora.request import LoRARequest

            lora = LoRARequest(folder, 1 << 20, folder, load_inplace=True)
            llm.add_lora(lora)
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
            for number, prompt in enumerate(prompts):
                tokens = {"type": "token", "prompt_token_ids": list(prompt)}
                llm.add_request(f"file-{folder}-{number}", tokens, params, lora_request=lora)
            answers: dict[str, list[int]] = {}
            while len(answers) < len(prompts):
                for output in llm.step():
                    if output.finished:
                        answers[output.request_id] = list(output.outputs[0].token_ids)
            return [answers[f"file-{folder}-{number}"] for number in range(len(prompts))]

        return await asyncio.to_thread(self._engine.call, ask)
