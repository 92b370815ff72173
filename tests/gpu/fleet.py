"""Actors with a Qwen3 on a GPU: FSDP2 shards that train it, and engines that show what they hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tests.gpu import sglang_probe
from tests.gpu.live_bytes import Live
from tests.gpu.same_answers import Answers
from tests.gpu.vllm_probe import OPTIONS, beside, flip, kernels, live, probe, wrong_slots
from tests.patience import patient
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.memory.tensors import named_tensors


class Trainer(TrainerShard):
    """One rank of `num_ranks`; the weights lie on the GPU, or on the host, as `source` says.

    With ``turns``, they lie on the GPU and can be offloaded. `quantization` is that of `TrainerShard`.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        num_ranks: int,
        dtype: str,
        source: str,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(offloads=source == "turns", quantization=quantization)
        self._path, self._rank, self._num_ranks = path, rank, num_ranks
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = "cpu" if source == "host" else "cuda"
        torch.cuda.init()  # it sits on its GPU wherever the weights are

    def join(self, meeting: str) -> None:
        """`meeting` is a file that all ranks see."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self._path)
        model = AutoModelForCausalLM.from_config(config, dtype=self._dtype).to(self._device)
        if self._num_ranks > 1:
            backend = "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo"
            dist.init_process_group(
                backend, init_method=f"file://{meeting}", rank=self._rank, world_size=self._num_ranks
            )
            mesh = init_device_mesh(self._device, (self._num_ranks,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model = model

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Other values in every element."""
        draw = torch.Generator(device=self._device).manual_seed(seed * 1000 + self._rank)
        for parameter in self.model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.normal_(generator=draw)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copy a model that is whole here to the host, in its own dtype."""
        return {name: each.detach().cpu() for name, each in self.model.state_dict().items()}

    def load(self, path: str) -> None:
        """The weights of another checkpoint of the same shape, into the memory that there is."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype).state_dict()
        set_model_state_dict(self.model, whole, options=StateDictOptions(full_state_dict=True))

    def remember(self, paths: Sequence[str]) -> None:
        """Read checkpoints of the same shape once, for `become`."""
        self._versions = []
        for path in paths:
            self.load(path)
            self._versions.append([each.detach().cpu().clone() for each in self.model.parameters()])

    @torch.no_grad()
    def become(self, number: int) -> None:
        """Train, in effect: other values in the memory that there is."""
        for parameter, values in zip(self.model.parameters(), self._versions[number], strict=True):
            parameter.copy_(values)

    @torch.no_grad()
    def gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """How far below the best the tokens' logits lie on average, in standard deviations."""
        ids = torch.tensor([[*prompt, *tokens]], device=self._device)
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float()
        taken = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return ((logits.amax(1) - taken) / logits.std(1)).mean().item()

    @torch.no_grad()
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The whole weights in bfloat16, on the host; all ranks have to be asked."""
        tensors = named_tensors(self.model)[0]
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
        return {name: tensor.detach().to(torch.bfloat16).cpu() for name, tensor in whole.items()}

    def device_nbytes(self) -> int:
        """What is in use on this GPU, by whomever."""
        free, total = torch.cuda.mem_get_info()
        return total - free


class Engine(EngineActor):
    """The torch engine, in bfloat16 on its GPU."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__("torch", path, name, {"dtype": "bfloat16", "device": "cuda"})

    async def weights(self) -> Mapping[str, torch.Tensor]:
        return await asyncio.to_thread(self._weights)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        tensors = named_tensors(self._engine.model)[0]
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    async def pid(self) -> int:
        return os.getpid()


class VllmEngine(EngineActor):
    """vLLM with CUDA graphs, started with dummy weights, and asked the probe's questions."""

    def __init__(self, path: str, name: str, num_ranks: int, **options: object) -> None:
        super().__init__("vllm", path, name, {"tensor_parallel_size": num_ranks, **OPTIONS, **options})

    async def answers(self) -> Answers:
        return await asyncio.to_thread(self._engine.call, probe)

    async def live(self) -> Live:
        return await asyncio.to_thread(self._engine.call, live)

    async def kernels(self) -> set[str]:
        return await asyncio.to_thread(self._engine.call, kernels)

    async def beside(self) -> list[list[str]]:
        return await asyncio.to_thread(self._engine.call, beside)

    async def flip(self, leaf: str) -> None:
        await asyncio.to_thread(self._engine.call, lambda llm: flip(llm, leaf))

    async def wrong_slots(self, checkpoint: str) -> list[str]:
        return await asyncio.to_thread(self._engine.call, lambda llm: wrong_slots(llm, checkpoint))


class SglangEngine(EngineActor):
    """SGLang with CUDA graphs, started with dummy weights, and asked its probe's questions."""

    def __init__(self, path: str, name: str, num_ranks: int, **options: object) -> None:
        loader = {"custom_weight_loader": [sglang_probe.LOADER]}
        options = {"tensor_parallel_size": num_ranks, **sglang_probe.OPTIONS, **loader, **options}
        super().__init__("sglang", path, name, options)

    async def answers(self) -> Answers:
        return await asyncio.to_thread(sglang_probe.answers_of, self._engine)

    async def live(self) -> Live:
        return await asyncio.to_thread(sglang_probe.live_of, self._engine)

    async def label(self) -> str:
        return await asyncio.to_thread(sglang_probe.label_of, self._engine)


def spawn(
    cls: type,
    bundles: PlacementGroup,
    gpu: int,
    *args: object,
    share: float = 0.4,
    visible: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **named: object,
) -> Any:
    """An actor on bundle `gpu`, with a `share` of its GPU; with none, it sees the `visible` ones.

    `env`: environment variables of its process.
    """
    options = {"num_cpus": 0, "num_gpus": share, "max_restarts": 0, "scheduling_strategy": _at(bundles, gpu)}
    variables = {**(env or {}), **({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {})}
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    return ray.remote(cls).options(**options).remote(*args, **named)


def spawn_engine(
    cls: type[EngineActor], bundles: PlacementGroup, gpus: Sequence[int], *args: object, **named: Any
) -> Any:
    """An engine with a rank on each of the bundles `gpus`. `named`: also those of `spawn`.

    Further ranks are the engine's own processes, so that one actor has to see all its GPUs.
    """
    if len(gpus) == 1:
        return spawn(cls, bundles, gpus[0], *args, **named)
    return spawn(cls, bundles, 0, *args, share=0, visible=_visible_devices(bundles, gpus), **named)


def _visible_devices(bundles: PlacementGroup, gpus: Sequence[int]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES says on each of these bundles."""
    asked = [_visible.options(scheduling_strategy=_at(bundles, gpu)).remote() for gpu in gpus]
    return ray.get(asked, timeout=patient(60))


@ray.remote(num_cpus=0, num_gpus=0.01)
def _visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def _at(bundles: PlacementGroup, gpu: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=gpu)
