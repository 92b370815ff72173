"""verl's own CheckpointEngineManager over Ray, with its rollout workers; run by test_verl.py.

    python -m tests.contract.verl_fleet FOLDER [nccl]

Two actors, of which one sends, and two replicas; one leaves after the second update, and comes back. With
nccl one actor on a GPU and one replica on another, since NCCL takes one rank for each GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

from tests.patience import patient

PATH = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


def configured(transport: str) -> CheckpointEngineConfig:
    return CheckpointEngineConfig(
        backend="weightsync",
        custom_backend_module="weightsync.plugins.verl",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"weightsync": {"transport": transport, "timeout_s": patient(60)}},
    )


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(version)
    for number, shape in enumerate(
        [(1000, 700), (), (3,), (0, 4), (8, 8)]
    ):  # the first takes several buckets
        yield f"layer.{number}.weight", torch.randn(shape, generator=draw).to(torch.bfloat16)


class Actor(Worker):
    """The part of verl's ActorRolloutRefWorker that moves weights."""

    def __init__(self, config: CheckpointEngineConfig, is_master: bool) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        options = config.engine_kwargs["weightsync"]
        self.device = "cuda" if options["transport"] == "nccl" else "cpu"
        self.engine = CheckpointEngineRegistry.new(
            config.backend, is_master=is_master, bucket_size=1 << 20, **options
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, object]:
        assert mode == "weightsync"
        sent = ((name, tensor.to(self.device)) for name, tensor in weights(global_steps))
        return await self.engine.send_weights(sent, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: object, **kwargs: object) -> object:
        return getattr(self.engine, method)(*args, **kwargs)


class Adapter:
    """In the place of verl's client of an inference server."""

    def __init__(self) -> None:
        self.equal: list[int] = []

    async def update_weights(
        self, came: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int, wire_format: str
    ) -> None:
        assert wire_format == "named_tensors"
        held = {name: tensor.cpu().clone() async for name, tensor in came}
        wanted = dict(weights(global_steps))
        if list(held) == list(wanted) and all(torch.equal(held[name], wanted[name]) for name in wanted):
            self.equal.append(global_steps)


class Replica:
    """One server with one worker; pausing it is not what is tested here."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    async def nothing(self, **_: object) -> None: ...

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def start(kind: type, folder: Path, gpu: int | None, *args: object) -> Any:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env |= {"DIST_INIT_METHOD": f"file://{folder}/{uuid4().hex}", "PYTHONPATH": PATH}
    if gpu is not None:
        env |= {"CUDA_VISIBLE_DEVICES": str(gpu), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return ray.remote(kind).options(runtime_env={"env_vars": env}).remote(*args)


def main(folder: Path, transport: str = "gloo") -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    config, gpus = configured(transport), [0, 1] if transport == "nccl" else [None] * 4
    num_actors = len(gpus) // 2
    actors = [start(Actor, folder, gpu, config, not i) for i, gpu in enumerate(gpus[:num_actors])]
    group = RayWorkerGroup(
        worker_handles=actors, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Actor))
    )
    settings = SimpleNamespace(name="vllm", checkpoint_engine=config)
    workers = [
        start(CheckpointEngineWorker, folder, gpu, settings, None, Adapter()) for gpu in gpus[num_actors:]
    ]
    replicas = [*map(Replica, workers)]
    manager = CheckpointEngineManager(config, group, replicas)

    def update(version: int) -> list[str]:
        manager.update_weights(global_steps=version)
        asked = [actors[0].__ray_call__.remote(lambda self: self.engine.epoch)]
        asked += [each.__ray_call__.remote(lambda self: self.checkpoint_engine.epoch) for each in workers]
        return ray.get(asked)

    epochs = [update(1), update(2)]
    assert epochs[0] == epochs[1], "the communicator was not kept"
    assert len(set(epochs[0])) == 1
    others = replicas[1:]
    if others:
        manager.remove_replicas(others)
    epochs.append(update(3))
    if others:
        assert epochs[2][0] == epochs[2][1] != epochs[1][0], "who left is waited for"
        manager.add_replicas(others)
    assert len(set(update(4))) == 1
    equal = [ray.get(each.__ray_call__.remote(lambda self: self.server_adapter.equal)) for each in workers]
    assert equal == [[1, 2, 3, 4], [1, 2, 4]][: len(workers)], equal


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    ray.shutdown()
