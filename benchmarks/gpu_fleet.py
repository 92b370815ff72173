"""The benchmarks' fleet: trainers and an engine that only hold weights.

Trainers cut tensors along the first dimension, like FSDP2. Engine ranks cut tensors like tensor parallelism.
Both are built from the same parts as real trainers and engines.
"""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.cluster import kill, spawn
from benchmarks.models import Tensor, rank_box
from benchmarks.values import Held, count_wrong, fill, poison, touch
from weightsync.actors.engine_calls import EngineCalls
from weightsync.actors.ray.placement import Placement
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.channel.feed import EngineFeed
from weightsync.engines.loading.live_writer import LiveWriter, exported
from weightsync.memory.kernels.device_kernels import load_digests
from weightsync.memory.tensors import device_id
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.messages import Attached, Loaded

if TYPE_CHECKING:
    from weightsync.plan import Plan
    from weightsync.protocol.messages import FeedTicket

__all__ = [
    "Destination",
    "EngineFront",
    "EngineRank",
    "Fleet",
    "Model",
    "RankActors",
    "ShardTrainer",
    "device_used",
    "register",
    "start_engine",
    "start_fleet",
]

Model = Sequence[Tensor]


def device_used() -> tuple[str, int]:
    """Return this process's GPU and the GPU's bytes in use; empty and 0 without a GPU."""
    if not torch.cuda.is_available():
        return "", 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return device_id(torch.device("cuda", 0)), total - free


def own_device() -> torch.device:
    """Return this process's current GPU, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


class ShardTrainer(TrainerShard):
    """One rank of a trainer whose tensors are cut along the first dimension."""

    def __init__(
        self, model: Model, rank: int, num_ranks: int, meeting: str, source: str, slot: str | None
    ) -> None:
        """`meeting` is a file that all ranks see; `source` is ``device`` or ``host``."""
        super().__init__(slot)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
        device = own_device() if source == "device" else torch.device("cpu")
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        mesh = init_device_mesh(device.type, (num_ranks,))
        self.parts: list[Held] = []
        self.model = nn.Module()
        modules = {"": self.model}
        for tensor in model:
            parameter = self._shard(tensor, mesh, device) if num_ranks > 1 else self._whole(tensor, device)
            register(modules, tensor.name, parameter)

    def change(self, version: int) -> None:
        """Write `version` into every element."""
        fill(self.parts, version)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def touch(self, version: int, fraction: float) -> None:
        """Change a fraction of all elements, which `version` chooses."""
        touch(self.parts, version, fraction)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def used(self) -> tuple[str, int]:
        """Return this process's GPU and its bytes in use."""
        return device_used()

    def _whole(self, tensor: Tensor, device: torch.device) -> torch.Tensor:
        local = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
        self.parts.append((tensor, Box.whole(tensor.shape), local))
        return local

    def _shard(self, tensor: Tensor, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
        extent, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, [Shard(0)])
        local = torch.empty(tuple(extent), dtype=torch.bfloat16, device=device)
        self.parts.append((tensor, Box(tuple(offset), tuple(extent)), local))
        shape = torch.Size(tensor.shape)
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


class Destination:
    """One engine rank's slices of a model, at fixed addresses."""

    def __init__(self, model: Model, rank: int, num_ranks: int) -> None:
        self.device = own_device()
        self.held = [(tensor, rank_box(tensor, rank, num_ranks)) for tensor in model]
        self.live = {
            tensor.name: torch.empty(box.extent, dtype=torch.bfloat16, device=self.device)
            for tensor, box in self.held
        }

    def poison(self) -> None:
        """Make every byte wrong."""
        poison(self.live.values())
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def wrong(self, version: int) -> int:
        """Count the elements that differ from `version`."""
        return count_wrong(((each, box, self.live[each.name]) for each, box in self.held), version)

    def used(self) -> tuple[str, int]:
        """Return this process's GPU and its bytes in use."""
        return device_used()


class EngineRank(Destination):
    """One rank of an engine. Buckets are written straight into the rank's slices."""

    def __init__(self, model: Model, rank: int, num_ranks: int, slot: str | None) -> None:
        super().__init__(model, rank, num_ranks)
        self._slot = slot
        self._feed: EngineFeed | None = None
        self._writer: LiveWriter | None = None
        self._layout = RankLayout(
            tuple(TensorMeta(tensor.name, "bfloat16", tensor.shape) for tensor, _ in self.held),
            tuple(_segment(tensor, box, self.live[tensor.name]) for tensor, box in self.held),
            buffers=tuple(TensorMeta(tensor.name, "bfloat16", box.extent) for tensor, box in self.held),
            device=device_id(self.device),
        )
        if self.device.type == "cuda":  # after the start, as the ranks of real engines do
            on_daemon(partial(load_digests, [2]), "weightsync-kernels")
        gc.collect()
        gc.freeze()  # as vLLM's workers do after the start

    def placement(self) -> Placement:
        return Placement.here(self._slot)

    def layout(self) -> LayoutTable:
        return LayoutTable.of(self._layout)

    def can_export(self) -> bool:
        return self.export() is not None

    def export(self) -> DeviceMemory | None:
        return exported(self.live)

    def attach(self, plan: Plan, ticket: FeedTicket, timeout_s: float) -> Attached:
        if self._feed is not None:
            self._feed.close()
        self._feed = EngineFeed.open(ticket, plan, timeout_s)
        self._writer = LiveWriter(plan, self._layout, self.live, self._feed.slots, late=True)
        return Attached(self._feed.plan_digest, self._writer.export())

    def answer_loads(self, address: str) -> None:
        """Answer the engine's calls of `load` by a pipe. Returns once the pipe is connected."""
        pipe = Client(address)
        threading.Thread(target=self._answer_loads, args=(pipe,), daemon=True).start()

    def _answer_loads(self, pipe: Connection) -> None:
        while True:
            try:
                attempt, timeout_s = pipe.recv()
            except EOFError:
                return  # the engine has ended
            try:
                answer: Loaded | Exception = self._load(attempt, timeout_s)
            except Exception as error:  # noqa: BLE001 - the engine raises it
                answer = error
            pipe.send(answer)

    def _load(self, attempt: int, timeout_s: float) -> Loaded:
        assert self._feed is not None
        assert self._writer is not None
        self._writer.begin(self.live)
        return Loaded(self._feed.receive(attempt, self._writer, timeout_s), self._feed.spans)


class RankActors:
    """The adapter of `EngineFront`: forwards everything to the ranks. No request ever runs.

    Loads use pipes, since real engines do not call paused ranks through Ray: vLLM uses shared memory, and
    SGLang sockets.
    """

    def __init__(self, ranks: Sequence[ActorHandle[Any]]) -> None:
        self._ranks = ranks
        self._pipes = [*map(_connect, ranks)]
        self._version = 0

    def layout(self) -> Sequence[LayoutTable]:
        return _answers([rank.layout.remote() for rank in self._ranks])

    def can_export(self) -> Sequence[bool]:
        return _answers([rank.can_export.remote() for rank in self._ranks])

    def export(self) -> Sequence[DeviceMemory | None]:
        return _answers([rank.export.remote() for rank in self._ranks])

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        pairs, shared = zip(self._ranks, tickets, strict=True), ray.put(plan)
        return _answers([rank.attach.remote(shared, ticket, timeout_s) for rank, ticket in pairs])

    def pause(self, mode: str, timeout_s: float) -> None:
        """Do nothing: no request runs."""

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        for pipe in self._pipes:
            pipe.send((attempt, timeout_s))
        answers: list[Loaded | Exception] = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in answers if isinstance(answer, Loaded)]

    def resume(self, version: int) -> None:
        """Do nothing else: no request waits."""
        self._version = version

    def serving(self) -> int:
        return self._version

    def close(self) -> None:
        """Do nothing: `Fleet.close` ends the ranks."""


class EngineFront(EngineCalls):
    """The engine's actor, which WeightSync calls."""

    def __init__(self, ranks: Sequence[ActorHandle[Any]]) -> None:
        self._ranks, self._engine = ranks, RankActors(ranks)

    async def sync_placements(self, _: object = None) -> list[Placement]:
        return [*await asyncio.gather(*(rank.placement.remote() for rank in self._ranks))]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The driver's handles."""

    trainers: list[ActorHandle[Any]]
    ranks: list[ActorHandle[Any]]
    front: ActorHandle[Any]

    def prepare(self, version: int) -> None:
        """Write `version` to the trainers and poison the engine."""
        changes = [trainer.change.remote(version) for trainer in self.trainers]
        ray.get([*changes, *(rank.poison.remote() for rank in self.ranks)])

    def wrong(self, version: int) -> int:
        """Count the engine's elements that differ from `version`."""
        return sum(ray.get([rank.wrong.remote(version) for rank in self.ranks]))

    def used(self) -> dict[str, int]:
        """Return the bytes in use on each GPU."""
        return dict(ray.get([actor.used.remote() for actor in (*self.trainers, *self.ranks)]))

    def kill_engine(self) -> None:
        """Kill the engine and its ranks."""
        kill([self.front, *self.ranks])

    def close(self) -> None:
        kill(self.trainers)
        self.kill_engine()


def start_fleet(
    model: Model, trainer_gpus: Sequence[str | None], engine_gpus: Sequence[str | None], source: str
) -> Fleet:
    """Start a rank per GPU. None is a CPU slot, shared by equal ranks."""
    meeting = tempfile.mktemp(prefix="weightsync-bench-")  # gloo creates it; ranks outlive this call
    num_trainers = len(trainer_gpus)
    trainers = [
        spawn(ShardTrainer, model, i, num_trainers, meeting, source, _slot(i, gpu), gpu=gpu)
        for i, gpu in enumerate(trainer_gpus)
    ]
    return start_engine(model, trainers, engine_gpus)


def start_engine(
    model: Model, trainers: Sequence[ActorHandle[Any]], gpus: Sequence[str | None], cls: type = EngineRank
) -> Fleet:
    """Start an engine with a rank of `cls` on each of `gpus`, for `trainers` that have been started."""
    ranks = [spawn(cls, model, i, len(gpus), _slot(i, gpu), gpu=gpu) for i, gpu in enumerate(gpus)]
    return Fleet(list(trainers), ranks, spawn(EngineFront, ranks))


def _slot(rank: int, gpu: str | None) -> str | None:
    return None if gpu else f"slot-{rank}"


def _connect(rank: ActorHandle[Any]) -> Connection:
    with Listener(family="AF_UNIX") as listener:
        dialled = rank.answer_loads.remote(listener.address)
        pipe = listener.accept()
        ray.get(dialled)
    return pipe


def _answers(calls: Sequence[ObjectRef[Any]]) -> list[Any]:
    try:
        return list(ray.get(list(calls)))
    except RayTaskError as error:
        raise error.cause from error  # the controller expects our own errors, not nested ones


def register(modules: dict[str, nn.Module], name: str, tensor: torch.Tensor) -> None:
    """Register a tensor. `modules` has all modules by name, since walking a large model is slow."""
    path, _, leaf = name.rpartition(".")
    _module(modules, path).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def _module(modules: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in modules:
        above, _, leaf = path.rpartition(".")
        modules[path] = nn.Module()
        _module(modules, above).register_module(leaf, modules[path])
    return modules[path]


def _segment(tensor: Tensor, box: Box, live: torch.Tensor) -> Segment:
    strides = tuple(stride * live.element_size() for stride in live.stride())
    return Segment(tensor.name, box, tensor.name, 0, strides)
