"""A trainer with a PEFT adapter on a GPU, and engines that also load adapters from files."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gpu import sglang_probe, vllm_probe
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
FILE_NUMBER = 7
"""vLLM's of adapters from files. Those of slots that are written here are larger."""


class AdapterTrainer(TrainerShard):
    """One rank, with a base in bfloat16."""

    def start(
        self,
        path: str,
        rank: int,
        autocast: bool = False,
        targets: Sequence[str] = TARGETS,
        parameters: Sequence[str] = (),
    ) -> None:
        """Load the base, and add an adapter of `rank`, with `autocast` in float32.

        `parameters` are those that PEFT adapts itself, such as stacked experts.
        """
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        # torch's own attention may want a newer cuDNN than there is.
        base = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="eager"
        ).cuda()
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=list(targets),
            target_parameters=[*parameters] or None,
        )
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


class ZeroAdapterTrainer(AdapterTrainer):
    """One ZeRO-3 rank of DeepSpeed's, with a base in bfloat16."""

    def join(self, path: str, rank: int, number: int, num_ranks: int, meeting: str) -> None:
        """Load the base with an adapter of `rank`, and have DeepSpeed cut it over `num_ranks`."""
        import deepspeed

        os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor its own GPU
        torch.cuda.set_device(0)
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{meeting}", rank=number, world_size=num_ranks
        )
        self.start(path, rank)
        self._number = number
        trained = [each for each in self.model.parameters() if each.requires_grad]
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 4000},
        }
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.model, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=settings)

    def train(self, seed: int) -> None:
        """Take one optimizer step on random tokens. All ranks have to call it."""
        draw = torch.Generator("cuda").manual_seed(seed * 1000 + self._number)
        tokens = torch.randint(0, 5000, (1, 32), generator=draw, device="cuda")
        self.model.backward(self.model(tokens, labels=tokens).loss)
        self.model.step()

    def save(self, folder: str) -> None:
        """Save the adapter that DeepSpeed gathers as PEFT does. All ranks have to call it."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.module.parameters())):
            if self._number == 0:
                self.model.module.save_pretrained(folder)
        torch.distributed.barrier()


class VllmAdapters(EngineActor):
    """A vLLM with CUDA graphs and adapter slots, started with dummy weights."""

    def __init__(self, path: str, name: str, num_ranks: int, rank: int, **more: object) -> None:
        slots = {"enable_lora": True, "max_loras": 3, "max_lora_rank": rank, **more}
        super().__init__(
            "vllm", path, name, {"tensor_parallel_size": num_ranks, **vllm_probe.OPTIONS, **slots}
        )

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

            lora = LoRARequest(folder, FILE_NUMBER, folder, load_inplace=True)
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


class SglangAdapters(EngineActor):
    """An SGLang with CUDA graphs and adapter slots, started with dummy weights."""

    def __init__(self, path: str, name: str, num_ranks: int, rank: int, **more: object) -> None:
        slots = {"enable_lora": True, "max_loras_per_batch": 4, "max_lora_rank": rank, **more}
        given = {"tensor_parallel_size": num_ranks, **sglang_probe.OPTIONS, **slots}
        own = {"lora_target_modules": list(TARGETS), "custom_weight_loader": [sglang_probe.SLOTS_LOADER]}
        super().__init__("sglang", path, name, {**own, **given})

    async def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    async def slots(self) -> list[Mapping[str, Any]]:
        """Return the process of each rank, and its slots, see `sglang_probe.slots`."""
        return await asyncio.to_thread(sglang_probe.slots_of, self._engine)

    async def by_file(
        self, folder: str, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[list[int]]:
        """Return what SGLang answers once its own loader has read an adapter from files."""
        return await asyncio.to_thread(self._by_file, folder, prompts, num_tokens)

    def _by_file(self, folder: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        from safetensors.torch import load_file

        from weightsync.engines.serving.request_loop import Params
        from weightsync.engines.sglang.lora import Adapted

        engine: Any = self._engine
        # An SGLang that starts with dummy weights reads no files.
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        refused = engine.loop.call(lambda server: server.load_lora(folder, config, tensors, pinned=False))
        assert not refused, refused
        greedy = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        made = engine.loop.complete(prompts, [Params(Adapted(greedy, folder, folder))] * len(prompts))
        engine.loop.call(lambda server: server.unload_lora(folder))
        return [each.tokens for each in made]
