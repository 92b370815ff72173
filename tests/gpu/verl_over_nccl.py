"""verl's own CheckpointEngineManager over Ray and NCCL, with its rollout workers.

    python -m tests.gpu.verl_over_nccl FOLDER

NCCL takes one rank for each GPU: one actor has the first GPU, one replica the second, and another replica
takes its place after the second update. On CPUs, `tests.contract.verl_run` has verl's own actors and
replicas.
"""

from __future__ import annotations

import os
import sys
import time
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


CONFIG = CheckpointEngineConfig(
    backend="weightsync",
    custom_backend_module="weightsync.plugins.verl",
    update_weights_bucket_megabytes=1,
    engine_kwargs={"weightsync": {"transport": "nccl", "timeout_s": patient(60)}},
)


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(version)
    for number, shape in enumerate(
        [(1000, 700), (), (3,), (0, 4), (8, 8)]
    ):  # the first takes several buckets
        yield f"layer.{number}.weight", torch.randn(shape, generator=draw).to(torch.bfloat16)


class Actor(Worker):
    """The part of verl's ActorRolloutRefWorker that moves weights."""

    def __init__(self) -> None:
        super().__init__()
        import_external_libs(CONFIG.custom_backend_module)
        options = CONFIG.engine_kwargs["weightsync"]
        self.engine = CheckpointEngineRegistry.new(
            CONFIG.backend, is_master=True, bucket_size=1 << 20, **options
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, object]:
        assert mode == "weightsync"
        sent = ((name, tensor.cuda()) for name, tensor in weights(global_steps))
        return await self.engine.send_weights(sent, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: object, **kwargs: object) -> object:
        return getattr(self.engine, method)(*args, **kwargs)


class Adapter:
    """In the place of verl's client of an inference server."""

    def __init__(self) -> None:
        self.equal: list[tuple[int, str]] = []

    async def update_weights(
        self, came: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int, wire_format: str
    ) -> None:
        assert wire_format == "named_tensors"
        held, devices = {}, set()
        async for name, tensor in came:
            held[name] = tensor.cpu().clone()
            devices.add(tensor.device.type)
        (device,) = devices
        wanted = dict(weights(global_steps))
        if list(held) == list(wanted) and all(torch.equal(held[name], wanted[name]) for name in wanted):
            self.equal.append((global_steps, device))


class Replica:
    """One server with one worker; pausing it is not what is tested here."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    async def nothing(self, **_: object) -> None: ...

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


class Fleet:
    """The actor, verl's manager, and replicas in the order in which they came."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._actor = self._start(Actor)
        self.group = RayWorkerGroup(
            worker_handles=[self._actor], ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Actor))
        )
        self.manager = CheckpointEngineManager(CONFIG, self.group, [])
        self._workers: list[Any] = []

    def add(self) -> Replica:
        settings = SimpleNamespace(name="vllm", checkpoint_engine=CONFIG)
        self._workers.append(self._start(CheckpointEngineWorker, settings, None, Adapter()))
        replica = Replica(self._workers[-1])
        self.manager.add_replicas([replica])
        return replica

    def kill(self, replica: Replica) -> None:
        (worker,) = replica.workers
        self._workers.remove(worker)
        self.manager.remove_replicas([replica])
        ray.kill(worker)

    def update(self, version: int) -> list[str]:
        """Return the names of the communicators of the actor that sends and of each replica."""
        began = time.monotonic()
        self.manager.update_weights(global_steps=version)
        say(f"version {version} is there after {time.monotonic() - began:.1f} s")
        asked = [self._actor.__ray_call__.remote(lambda self: self.engine.epoch)]
        asked += [
            each.__ray_call__.remote(lambda self: self.checkpoint_engine.epoch) for each in self._workers
        ]
        return ray.get(asked)

    def equal(self) -> list[list[tuple[int, str]]]:
        """Of each replica, the versions that came bit for bit, and on which kind of device."""
        return ray.get(
            [each.__ray_call__.remote(lambda self: self.server_adapter.equal) for each in self._workers]
        )

    def _start(self, kind: type, *args: object) -> Any:
        # Of the GPUs, Ray shows an actor its own, as verl has it.
        env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{self._folder}/{uuid4().hex}"}
        options = {"num_gpus": 1, "runtime_env": {"env_vars": env | {"PYTHONPATH": PATH}}}
        return ray.remote(kind).options(**options).remote(*args)


def update(folder: Path) -> None:
    fleet = Fleet(folder)
    first = fleet.add()
    epochs = [fleet.update(1), fleet.update(2)]
    assert epochs[0] == epochs[1], "the communicator was not kept"
    equal = fleet.equal()
    assert equal == [[(1, "cuda"), (2, "cuda")]], equal
    fleet.kill(first)
    fleet.add()
    epochs += [fleet.update(3), fleet.update(4)]
    assert epochs[2] == epochs[3] != epochs[1], "who left is waited for"
    assert all(len(set(each)) == 1 for each in epochs), epochs
    equal = fleet.equal()
    assert equal == [[(3, "cuda"), (4, "cuda")]], equal


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(folder: Path) -> None:
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
        # A host that gives its guest memory as it is used looks full when it is not.
        _system_config={"memory_monitor_refresh_ms": 0},
    )
    say("Ray is up")
    update(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    ray.shutdown()
