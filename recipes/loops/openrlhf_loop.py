"""An OpenRLHF loop with OpenRLHF's actors, in which weightsync replaces the broadcast.

    python -m weightsync.recipes.loops.openrlhf_loop MODEL_FOLDER

Lines ending in "# +" were added for weightsync, lines beginning with "# -" were there before. Code that
only the broadcast needs may go too. On a CPU, DeepSpeed ZeRO-3 learns by REINFORCE to say small numbers.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from typing import Any
from uuid import uuid4

import deepspeed
import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM

from weightsync import TrainerShard, VllmActor, WeightSync  # +

Tokens = list[list[int]]
LENGTH, HOST = 8, "127.0.0.1"
Group: Any = dist.ProcessGroupGloo  # its stub lacks the collectives
ZERO_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


class WorkerWrap:
    """Mixed into vLLM's workers. Reloads layer by layer, as vLLM on a CPU packs what it loads."""

    def init_process_group(self: Any, address: str, port: int, rank_offset: int, world_size: int) -> None:
        self._group = Group(TCPStore(address, port), rank_offset + self.rank, world_size)
        self._reloads = False

    def update_weight(self: Any, name: str, dtype: str, shape: list[int], empty_cache: bool) -> None:
        from vllm.model_executor.model_loader import reload

        weight = torch.empty(shape, dtype=getattr(torch, dtype))
        self._group.broadcast([weight]).wait()
        if not self._reloads:
            reload.initialize_layerwise_reload(self.model_runner.model)
        self.model_runner.model.load_weights([(name, weight)])
        if empty_cache:
            reload.finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._reloads = not empty_cache


# - class RolloutActor:
class RolloutActor(VllmActor):  # +
    def __init__(self, path: str) -> None:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings: Any = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
        # - settings["worker_extension_cls"] = "weightsync.recipes.loops.openrlhf_loop.WorkerWrap"
        settings["worker_extension_cls"] = "weightsync.WeightSyncWorker"  # +
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(path, skip_tokenizer_init=True, **settings))

    async def generate(self, prompts: Tokens, temperature: float) -> Tokens:
        return await asyncio.gather(*(self.complete(prompt, temperature) for prompt in prompts))

    async def complete(self, prompt: list[int], temperature: float) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        async for each in self.llm.generate({"prompt_token_ids": prompt}, params, uuid4().hex):
            answer = list(each.outputs[0].token_ids)
        return answer

    async def init_process_group(self, *where: object) -> None:
        await self.llm.collective_rpc("init_process_group", args=where)

    async def update_weight(self, *weight: object) -> None:
        await self.llm.collective_rpc("update_weight", args=weight)


# - class PolicyModelActor:
class PolicyModelActor(TrainerShard):  # +
    def __init__(self, path: str, rank: int, world_size: int, meeting: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor its own GPU
        from deepspeed.ops import __compatible_ops__ as compiles

        compiles["deepspeed_shm_comm"] = False  # which takes minutes on a CPU
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.rank, self.parameters = rank, list(model.named_parameters())
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO_3)

    def train_step(self, prompts: Tokens, answers: Tokens) -> float:
        prompt, answer = torch.tensor(prompts), torch.tensor(answers)
        logprobs = self.model(torch.cat([prompt, answer], 1)).logits[:, -LENGTH - 1 : -1].log_softmax(-1)
        reward = (answer < 16).float().mean(1)
        taken = logprobs.gather(2, answer[:, :, None]).sum((1, 2))
        self.model.backward(((reward.mean() - reward) * taken).mean())
        self.model.step()
        return reward.mean().item()

    def greedy(self, prompts: Tokens) -> Tokens:
        tokens = torch.tensor(prompts)
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, self.model(tokens).logits[:, -1:].argmax(-1)], 1)
        return tokens[:, -LENGTH:].tolist()

    def connect_to_vllm(self, engines: list[Any]) -> None:
        if self.rank == 0:
            store, size = TCPStore(HOST, 0, is_master=True, wait_for_workers=False), len(engines) + 1
            made = [e.init_process_group.remote(HOST, store.port, 1 + i, size) for i, e in enumerate(engines)]
            self._group = Group(store, 0, size)
            ray.get(made)

    def broadcast_to_vllm(self, engines: list[Any]) -> None:
        for count, (name, parameter) in enumerate(self.parameters, start=1):
            with deepspeed.zero.GatheredParameters(parameter):
                weight = parameter.detach().clone()
            if self.rank == 0:
                about = name, str(weight.dtype)[6:], list(weight.shape), count == len(self.parameters)
                calls = [engine.update_weight.remote(*about) for engine in engines]
                self._group.broadcast([weight]).wait()
                ray.get(calls)


def run(path: str, size: int = 2, steps: int = 3) -> list[Tokens]:
    """Run `size` trainers and engines on Ray. Returns the greedy tokens of each."""
    engines = [ray.remote(RolloutActor).remote(path) for _ in range(size)]
    meeting, policy = f"{tempfile.mkdtemp()}/meeting", ray.remote(PolicyModelActor)
    policies = [policy.remote(path, rank, size, meeting) for rank in range(size)]
    # - ray.get([policy.connect_to_vllm.remote(engines) for policy in policies])
    sync = WeightSync()  # +
    sync.register_trainers(policies)  # +
    sync.register_engines({f"engine-{i}": engine for i, engine in enumerate(engines)})  # +
    sync.connect()  # +
    shares = torch.randint(0, 64, (size, 16, 4), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(1, steps + 1):
        made = ray.get([engines[i].generate.remote(shares[i], 1.0) for i in range(size)])
        rewards = ray.get([policies[i].train_step.remote(shares[i], made[i]) for i in range(size)])
        # - ray.get([policy.broadcast_to_vllm.remote(engines) for policy in policies])
        print(sync.update_weights(step))  # +
        print(f"step {step}: reward {sum(rewards) / size:.3f}")
    sync.close()  # +
    said: list[Tokens] = ray.get([policy.greedy.remote(shares[0]) for policy in policies])
    said += ray.get([engine.generate.remote(shares[0], 0.0) for engine in engines])
    ray.get([engine.__ray_call__.remote(lambda actor: actor.llm.shutdown()) for engine in engines])
    return said


if __name__ == "__main__":
    greedy = run(sys.argv[1])
    print("all equal" if all(each == greedy[0] for each in greedy) else greedy)
