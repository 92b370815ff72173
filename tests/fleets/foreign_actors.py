"""Classes of actors that know nothing of weightsync."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from tests.fleets.actors import build
from weightsync import WeightSyncWorker
from weightsync.testing import DictEngine

WIDTH = 16


class PlainTrainer:
    """As OpenRLHF's: the model is an attribute of an attribute."""

    def __init__(self) -> None:
        self.actor = SimpleNamespace(model=build(WIDTH))
        self.critic = build(WIDTH)

    def weights(self, path: str) -> dict[str, torch.Tensor]:
        return dict(attrgetter(path)(self).state_dict())

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.actor.model.parameters():
                parameter.normal_()
        return {name: tensor.clone() for name, tensor in self.actor.model.state_dict().items()}


class AsyncTrainer(PlainTrainer):
    async def train(self, seed: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().train(seed)


def engine_of_zeros() -> DictEngine:
    return DictEngine("", {name: torch.zeros_like(each) for name, each in build(WIDTH).state_dict().items()})


class PlainEngine:
    def __init__(self) -> None:
        self.llm = engine_of_zeros()

    def start_another(self) -> None:
        self.llm = engine_of_zeros()

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.llm.tensors)

    def pid(self) -> int:
        return os.getpid()


class AsyncEngine:
    def __init__(self) -> None:
        self.llm = engine_of_zeros()

    async def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.llm.tensors)

    async def pid(self) -> int:
        return os.getpid()


class DozingWorker(WeightSyncWorker):
    """Says in vLLM's own record that memory sleeps: on a CPU none does."""

    def doze(self, parts: list[str]) -> None:
        from vllm.device_allocator import AllocationData
        from vllm.device_allocator.cumem import CuMemAllocator

        held = {n: AllocationData((0, 0, n, 0), part, is_asleep=True) for n, part in enumerate(parts)}
        CuMemAllocator.instance = SimpleNamespace(pointer_to_data=held)


class VllmRollout:
    """An actor around vLLM, as a framework has it."""

    worker = "weightsync.WeightSyncWorker"
    ranks: Mapping[str, Any] = MappingProxyType({"distributed_executor_backend": "uni"})
    core_apart = "0"

    def __init__(self, path: str) -> None:
        # On CPUs, vLLM starts a process for the worker, too, unless told that there are no other processes.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = self.core_apart
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        self.llm = AsyncLLMEngine.from_engine_args(
            AsyncEngineArgs(
                path,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype="float32",
                enforce_eager=True,
                max_model_len=64,
                max_num_seqs=2,
                kv_cache_memory_bytes=1 << 26,
                worker_extension_cls=self.worker,
                **self.ranks,
            )
        )

    async def complete(self, prompt: list[int], num_tokens: int) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        async for output in self.llm.generate({"prompt_token_ids": prompt}, sampling, os.urandom(8).hex()):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def pid(self) -> int:
        return os.getpid()


class FarRollout(VllmRollout):
    """Has two ranks, which Ray starts on hosts with a GPU each."""

    ranks = MappingProxyType({"distributed_executor_backend": "ray", "tensor_parallel_size": 2})


class ReplicatedRollout(VllmRollout):
    """Has two replicas, which answer requests in turn."""

    ranks = MappingProxyType({"distributed_executor_backend": "uni", "data_parallel_size": 2})
    core_apart = "1"


class DozingRollout(VllmRollout):
    worker = "tests.fleets.foreign_actors.DozingWorker"

    async def doze(self, parts: list[str]) -> None:
        await self.llm.collective_rpc("doze", args=(parts,))


class TransformersTrainer:
    def __init__(self, path: str, device: str = "cpu") -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_config(config)
        self.actor = SimpleNamespace(model=model.to(device, config.dtype).eval())

    def says(self, seed: int) -> list[list[int]]:
        """Draw other weights, then complete the prompts of `tests.contract.trl_run`, as a server does."""
        from tests.contract.trl_run import PROMPTS

        return [self.complete(prompt, 16, seed) for prompt in PROMPTS]

    @torch.no_grad()
    def complete(self, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
        """Draw other weights, then complete greedily."""
        torch.manual_seed(seed)
        model = self.actor.model
        self.draw(model)
        asked = torch.tensor([prompt], device=model.device)
        made = model.generate(asked, max_new_tokens=num_tokens, do_sample=False)
        return list(made[0, len(prompt) :].tolist())

    def draw(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)


class SureTrainer(TransformersTrainer):
    """One token is so likely after another that all kernels say so, in bfloat16, too."""

    def draw(self, model: Any) -> None:
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1)
        said, read = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        said.copy_(read.normal_()[torch.randperm(len(read))])
