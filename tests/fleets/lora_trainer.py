"""Trainer ranks of LoRA adapters, and an engine that says its pid, for tests: their processes import this."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
NUM_SCORES = 20
"""As many log-probabilities as vLLM gives by default."""


class LoraTrainer(TrainerShard):
    """One rank of a model with PEFT's adapters, sharded by FSDP2 if there are several ranks."""

    def __init__(
        self,
        path: str,
        adapters: Mapping[str, int],
        rank: int = 0,
        world: int = 1,
        targets: Sequence[str] = TARGETS,
        merge: str = "",
        saves: Sequence[str] = (),
    ) -> None:
        """`adapters`: the rank of each one, by PEFT's name. `merge`: the one that the weights have merged.

        `saves`: modules that adapters save whole.
        """
        super().__init__(f"lora-{rank}", merge=merge)
        self.steps, self._targets, self._saves = 0, targets, saves
        self._rank, self._world, self._adapters, self._path = rank, world, adapters, path

    def start(self, meeting: str = "") -> None:
        """Load the model, and meet the other ranks at a file."""
        base = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32)
        configs = {
            name: LoraConfig(
                r=rank,
                lora_alpha=3 * rank,
                target_modules=list(self._targets),
                modules_to_save=list(self._saves) or None,
            )
            for name, rank in self._adapters.items()
        }
        (first, config), *others = configs.items()
        model = get_peft_model(base, config, first)
        for name, other in others:
            model.add_adapter(name, other)
        if self._world > 1:
            torch.distributed.init_process_group(
                "gloo", f"file://{meeting}", rank=self._rank, world_size=self._world
            )
            for layer in model.get_base_model().model.layers:
                fully_shard(layer)
            fully_shard(model)
        self.model = model

    @torch.no_grad()
    def train(self, adapter: str, seed: int) -> None:
        """Give an adapter other weights, the same on every rank."""
        draw = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if f".{adapter}." in name:
                whole = torch.randn(parameter.shape, generator=draw) * 0.3
                if isinstance(parameter, DTensor):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.copy_(whole)

    def step(self) -> None:
        """Train PEFT's default adapter, as the page does."""
        self.steps += 1
        self.train("default", self.steps)

    @torch.no_grad()
    def answers(self, adapter: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens of PEFT's own forward pass, with `adapter` or, if it is empty, without."""
        tokens = list(prompt)
        if adapter:
            self.model.set_adapter(adapter)
        else:
            self.model.disable_adapter_layers()
        for _ in range(num_tokens):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        self.model.enable_adapter_layers()
        return tokens[len(prompt) :]

    @torch.no_grad()
    def scores(self, adapter: str, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities by which each of `tokens` is drawn: float32[tokens, vocabulary]."""
        self.model.set_adapter(adapter)
        logits = self.model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        return logits.float().log_softmax(dim=-1)


class NamedEngine(EngineActor):
    """A vLLM that says which process it is, and what its requests were drawn by."""

    _scores: Sequence[Mapping[int, float]] | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def remove_lora(self, number: int) -> bool:
        """Have vLLM remove an adapter, as it does itself at the end of a weight transfer."""
        return bool(await asyncio.to_thread(self._engine.call, lambda llm: llm.remove_lora(number)))

    async def keep_scores(self) -> None:
        """Keep the log-probabilities of the likeliest tokens at each place of a request, from now on."""
        if self._scores is None:
            self._scores = ()
            await asyncio.to_thread(self._engine.call, self._keep)

    async def scores(self) -> Sequence[Mapping[int, float]]:
        """Return those of the request that ended last."""
        return self._scores or ()

    def _keep(self, llm: Any) -> None:
        add, step = llm.add_request, llm.step

        def add_request(name: str, prompt: object, params: Any, **more: object) -> object:
            params.logprobs = NUM_SCORES
            return add(name, prompt, params, **more)

        def step_and_keep() -> list[Any]:
            outputs = step()
            for output in outputs:
                if output.finished:
                    places = output.outputs[0].logprobs
                    self._scores = [
                        {token: each.logprob for token, each in place.items()} for place in places
                    ]
            return outputs

        llm.add_request, llm.step = add_request, step_and_keep
