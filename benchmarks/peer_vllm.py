"""A real vLLM, updated in our way and in vLLM's own ways.

`VllmUnderTest` is updated in our way. `OwnVllm` is updated by vLLM's weight transfer and tensor by tensor: a
plain ``vllm.LLM`` in one Ray actor and a trainer in another actor, as in vLLM's own examples
(``examples/rl/rlhf_nccl.py``, ``rlhf_ipc.py``). The trainer's side comes from vLLM 0.33.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from benchmarks.gpu_fleet import ShardTrainer, device_used
from benchmarks.models import Tensor
from benchmarks.rank_probe import synchronize
from benchmarks.values import count_wrong, poison
from weightsync.actors.engine import EngineActor
from weightsync.engines.vllm.api import set_environment
from weightsync.plan import Box

__all__ = ["BACKENDS", "OwnVllm", "VllmTrainer", "VllmUnderTest"]

BACKENDS = {
    "nccl": ("nccl_engine", "NCCLTrainerInitInfo"),
    "ipc": ("ipc_engine", "IPCTrainerInitInfo"),
    "nccl_m2n": ("m2n_trainer", "M2NTrainerInitInfo"),
    "sharded_rdt": ("sharded_rdt_trainer", "ShardedRDTTrainerInitInfo"),
}
"""Modules of vLLM with the settings of each backend's trainer side."""
_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}


class VllmTrainer(ShardTrainer):
    """A trainer with the whole model on one GPU, sent in vLLM's ways."""

    _sender: Any

    def open(self, engine: ActorHandle[Any], backend: str, settings: Mapping[str, Any]) -> None:
        """Connect to `engine` by vLLM's trainer side of `backend`, with `settings` for the init info."""
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        module, kind = BACKENDS[backend]
        init_info = getattr(importlib.import_module(f"vllm.distributed.weight_transfer.{module}"), kind)
        self._sender = WeightTransferTrainerFactory.trainer_init(
            init_info(rank=0, **settings),
            client=RayVLLMWeightSyncClient(engine),
            source=ModuleSource(self.model),
        )

    def send(self) -> None:
        """Send everything. Returns when the engine has all weights."""
        self._sender.send_weights()

    def send_each(self, engine: ActorHandle[Any]) -> None:
        """Send with one call to the engine and one NCCL broadcast per tensor, like OpenRLHF."""
        for tensor, _, whole in self.parts:
            taken = engine.take_one.remote(tensor.name, tuple(tensor.shape))
            self._sender.model_update_group.broadcast(whole, src=0, stream=torch.cuda.current_stream())
            ray.get(taken)


class VllmUnderTest(EngineActor):
    """Our engine actor, whose live weights can be poisoned and compared. One rank."""

    def __init__(self, model_path: str, model: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        super().__init__("vllm", model_path, "vllm", options)
        self._places = _places(model)

    async def poison(self) -> None:
        """Make every byte of every parameter wrong."""
        await self._on_worker(_poison)

    async def wrong(self, version: int) -> int:
        """Elements of vLLM's live parameters that differ from `version`."""
        return sum(await self._on_worker(lambda worker: _wrong(worker, self._places, version)))

    async def used(self) -> tuple[str, int]:
        """Return this process's GPU and its bytes in use."""
        return await asyncio.to_thread(device_used)

    async def _on_worker(self, work: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = await self._call(lambda engine: engine.collective_rpc(work))
        return answers

    async def _call(self, work: Callable[[Any], Any]) -> Any:  # noqa: ANN401 (whatever vLLM returns)
        engine: Any = self._engine  # behind our adapter, which only a benchmark may access
        return await asyncio.to_thread(engine.call, work)


class OwnVllm:
    """An actor with a ``vllm.LLM``, updated by vLLM's own calls. One rank."""

    def __init__(self, model_path: str, model: Sequence[Tensor], options: Mapping[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as in vLLM's examples
        set_environment()
        from vllm import LLM

        self._places = _places(model)
        self._llm = LLM(model_path, load_format="dummy", skip_tokenizer_init=True, **options)
        self._llm.sleep(level=0)

    def init_weight_transfer_engine(self, request: Any) -> None:  # noqa: ANN401 - vLLM's, as below
        """Make the connection. vLLM's trainer side calls this and the next three methods."""
        self._llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._llm.start_weight_update()

    def update_weights(self, request: Any) -> None:  # noqa: ANN401
        """Take a chunk, or all."""
        self._llm.update_weights(request)

    def finish_weight_update(self) -> None:
        """End an update."""
        self._llm.finish_weight_update()

    def take_one(self, name: str, shape: tuple[int, ...]) -> None:
        """Receive one tensor and hand it to vLLM's loader."""
        self._llm.collective_rpc(lambda worker: _take_one(worker, name, shape))

    def synchronize(self) -> None:
        """Wait for the device."""
        self._llm.collective_rpc(_synchronize)

    def poison(self) -> None:
        """Make every byte of every parameter wrong."""
        self._llm.collective_rpc(_poison)

    def wrong(self, version: int) -> int:
        """Elements of vLLM's live parameters that differ from `version`."""
        places = self._places  # captured, as vLLM would turn an argument into dicts
        return sum(self._llm.collective_rpc(lambda worker: _wrong(worker, places, version)))


def _places(model: Sequence[Tensor]) -> list[tuple[Tensor, str, int]]:
    """Return each tensor with the name of vLLM's parameter on one rank and the first row there."""
    rows = {tensor.name: tensor.shape[0] for tensor in model}
    places = []
    for tensor in model:
        module = tensor.name.split(".")[-2]
        fused, parts = _FUSED.get(module, (module, (module,)))
        earlier = parts[: parts.index(module)]
        first = sum(rows[tensor.name.replace(module, part)] for part in earlier)
        places.append((tensor, tensor.name.replace(module, fused), first))
    return places


def _take_one(worker: Any, name: str, shape: tuple[int, ...]) -> None:  # noqa: ANN401 (vLLM's Worker)
    weight = torch.empty(shape, dtype=torch.bfloat16, device=worker.device)
    group = worker.weight_transfer_engine.model_update_group
    group.broadcast(weight, src=0, stream=torch.cuda.current_stream())
    with torch.no_grad():
        worker.model_runner.model.load_weights([(name, weight)])


def _synchronize(worker: Any) -> None:  # noqa: ANN401 (vLLM's Worker)
    synchronize()


def _poison(worker: Any) -> None:  # noqa: ANN401 (vLLM's Worker)
    poison(parameter.data for parameter in worker.model_runner.model.parameters())
    synchronize()


def _wrong(worker: Any, places: Sequence[tuple[Tensor, str, int]], version: int) -> int:  # noqa: ANN401
    live = dict(worker.model_runner.model.named_parameters())
    assert set(live) == {name for _, name, _ in places}, set(live) ^ {name for _, name, _ in places}
    held = (
        (each, Box.whole(each.shape), live[name].data[first : first + each.shape[0]])
        for each, name, first in places
    )
    return count_wrong(held, version)
