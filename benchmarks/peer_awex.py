"""awex's own core between trainer and engine ranks, as actors: its plan, its operations, one NCCL group.

What awex does around it is left out, to its advantage: the server where ranks meet, the conversion of
names, and the process group that it makes and ends with each update.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.actor import ActorHandle

from benchmarks.cluster import kill, spawn
from benchmarks.gpu_fleet import Destination, Model, own_device, start_fleet
from benchmarks.isolate import emit, stage
from benchmarks.models import Tensor, model_of, rank_box
from benchmarks.rank_probe import synchronize
from benchmarks.turns import in_turns
from benchmarks.updates import spread
from benchmarks.values import fill
from weightsync.plan import Box

__all__ = ["compare_awex"]


class Rank:
    """One of awex's ranks: engines' come first."""

    _rank: int
    _plan: Any

    def join(self, model: Model, rank: int, num_engines: int, num_trainers: int, meeting: str) -> float:
        """Meet the others and plan; returns the seconds of the planning."""
        _skip_package()
        device = own_device()
        if device.type == "cpu":
            os.environ["AWEX_DEVICE_TYPE"] = "cpu"
        from awex.transfer.transfer_plan import TransferPlanBuilder
        from awex.util.process_group import setup_batch_isend_irecv

        self._rank, num_ranks = rank, num_engines + num_trainers
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=num_ranks,
        )
        if device.type == "cuda":
            setup_batch_isend_irecv(dist.group.WORLD, rank, num_ranks)
        started = time.perf_counter()
        engines = [_meta(tensor, num_engines) for tensor in model]
        trainers = [_meta(replace(tensor, cut=0), num_trainers) for tensor in model]
        builder = TransferPlanBuilder(num_engines, num_trainers, 1)
        self._plan = builder.build_local_transfer_plan(engines, trainers, rank)
        return time.perf_counter() - started


class Sender(Rank):
    """A trainer rank, whose tensors are cut along their first dimension."""

    def __init__(self, model: Model, rank: int, num_ranks: int) -> None:
        boxes = [(tensor, rank_box(replace(tensor, cut=0), rank, num_ranks)) for tensor in model]
        device = own_device()
        self._held = [
            (t, box, torch.empty(box.extent, dtype=torch.bfloat16, device=device)) for t, box in boxes
        ]

    def change(self, version: int) -> None:
        """Write `version` into every element."""
        fill(self._held, version)
        synchronize()

    def update(self) -> tuple[float, float]:
        """Seconds of building its operations, and of running them."""
        from awex.transfer.nccl_comm import batch_send_recv, nccl_build_send_ops

        started = time.perf_counter()
        parameters = {tensor.name: local for tensor, _, local in self._held}
        ops, _, _ = nccl_build_send_ops(parameters, self._plan, dist.group.WORLD, -1, True)
        built = time.perf_counter()
        batch_send_recv(ops, [], blocking=True, use_group=True)
        synchronize()
        return built - started, time.perf_counter() - built


class Receiver(Rank, Destination):
    """An engine rank."""

    def update(self) -> tuple[float, float]:
        """As the sender's; what does not lie in one run is received elsewhere and copied."""
        from awex.transfer.nccl_comm import batch_send_recv, nccl_build_recv_ops

        started = time.perf_counter()
        ops, apart, _ = nccl_build_recv_ops(self.live, self._plan, dist.group.WORLD, True)
        built = time.perf_counter()
        batch_send_recv([], ops, blocking=True, use_group=True)
        for target, received in apart:
            target.copy_(received)
        synchronize()
        return built - started, time.perf_counter() - built


@dataclass(slots=True)
class Awex:
    """The driver's handles.

    Attributes:
        planned_s: seconds of the slowest rank's planning, once.
    """

    senders: list[ActorHandle[Any]]
    receivers: list[ActorHandle[Any]]
    planned_s: float

    def prepare(self, version: int) -> None:
        """The senders hold `version`, the receivers nothing that is right."""
        changes = [sender.change.remote(version) for sender in self.senders]
        ray.get([*changes, *(receiver.poison.remote() for receiver in self.receivers)])

    def wrong(self, version: int) -> int:
        """Elements of the receivers that differ from `version`."""
        return sum(ray.get([receiver.wrong.remote(version) for receiver in self.receivers]))

    def update(self) -> dict[str, float]:
        """Seconds until the last rank is done; of that, the slowest rank's building and running."""
        started = time.perf_counter()
        ranks = ray.get([rank.update.remote() for rank in (*self.receivers, *self.senders)])
        total = time.perf_counter() - started
        return {"total": total, "build": max(b for b, _ in ranks), "run": max(r for _, r in ranks)}


def compare_awex(spec: Mapping[str, Any], gpus: Sequence[str]) -> None:
    """A row of ours and one of awex's, from trainer GPUs to the GPUs of one engine."""
    num_trainers, num_engines, cpu = spec["trainers"], spec["engines"], spec["cpu"]
    seats: list[str | None] = [None] * (num_trainers + num_engines) if cpu else [*gpus]
    if len(seats) < num_trainers + num_engines:
        raise SystemExit(f"{num_trainers + num_engines} GPUs asked for, {len(seats)} there")
    at = seats[:num_trainers], seats[num_trainers : num_trainers + num_engines]
    model = model_of("tiny" if cpu else "moe", 0, spec["layers"])
    row: dict[str, object] = {"table": "awex", "ranks": f"{num_trainers}:{num_engines}"}
    row |= {
        "shards": "uneven" if _uneven(model, num_trainers, num_engines) else "even",
        "tensors": len(model),
    }
    stage(f"{len(model)} tensors are made, twice")
    fleet = start_fleet(model, *at, "device")
    with _started(model, *at) as peer:
        ours, theirs = in_turns(fleet, peer, spec, on_gpus=not cpu)
    fleet.close()
    if ours:
        emit(row | {"system": "ours"} | ours)
    phases = [spread(name, [taken[name] for taken in theirs]) for name in ("total", "build", "run")]
    merged = {key: value for part in phases for key, value in part.items()}
    nbytes, total_ms = sum(tensor.nbytes for tensor in model), float(str(merged["total ms"]))
    merged |= {"GB": nbytes / 1e9, "GB/s": nbytes / total_ms / 1e6, "plan ms": peer.planned_s * 1e3}
    if floor_ms := ours.get("floor ms"):
        merged |= {"floor ms": floor_ms, "share": float(str(floor_ms)) / total_ms}
    emit(row | {"system": "awex"} | merged)


def _uneven(model: Model, num_trainers: int, num_engines: int) -> bool:
    cuts = [(tensor.shape[0], num_trainers) for tensor in model]
    cuts += [(tensor.shape[tensor.cut], num_engines) for tensor in model if tensor.cut is not None]
    return any(size % num_parts for size, num_parts in cuts)


@contextmanager
def _started(
    model: Model, trainer_gpus: Sequence[str | None], engine_gpus: Sequence[str | None]
) -> Iterator[Awex]:
    """A rank for each GPU named; None is this host."""
    num_trainers, num_engines = len(trainer_gpus), len(engine_gpus)
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder:
        receivers = [spawn(Receiver, model, i, num_engines, gpu=gpu) for i, gpu in enumerate(engine_gpus)]
        senders = [spawn(Sender, model, i, num_trainers, gpu=gpu) for i, gpu in enumerate(trainer_gpus)]
        joins = [
            rank.join.remote(model, i, num_engines, num_trainers, f"{folder}/meeting")
            for i, rank in enumerate((*receivers, *senders))
        ]
        yield Awex(senders, receivers, max(ray.get(joins)))
        kill([*senders, *receivers])


def _skip_package() -> None:
    """awex's own ``__init__`` imports Megatron, which its core does without."""
    found = importlib.util.find_spec("awex")
    assert found is not None
    package = types.ModuleType("awex")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules.setdefault("awex", package)


def _meta(tensor: Tensor, num_ranks: int) -> Any:  # noqa: ANN401 (awex's ParameterMeta)
    """What awex is told: one replica cut into shards, or as many replicas as ranks."""
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta

    boxes = [rank_box(tensor, rank, num_ranks) for rank in range(num_ranks)]
    shards = [_shard(tensor, rank, num_ranks, box) for rank, box in enumerate(boxes) if box.numel]
    replicas = [[shard] for shard in shards] if tensor.cut is None else [shards]
    return ParameterMeta(
        tensor.name,
        math.prod(tensor.shape),
        tensor.shape,
        torch.bfloat16,
        shards,
        [ParameterReplicaMeta(each) for each in replicas],
    )


def _shard(tensor: Tensor, rank: int, num_ranks: int, box: Box) -> Any:  # noqa: ANN401 (awex's)
    from awex.meta.weight_meta import ParameterShardMeta
    from awex.sharding.param_sharding import ShardingType

    cut = tensor.cut is not None and num_ranks > 1
    return ParameterShardMeta(
        tp_rank=rank,
        attn_tp_rank=rank,
        pp_rank=0,
        ep_rank=0,
        ep_tp_rank=0,
        global_rank=rank,
        world_size=num_ranks,
        engine_rank=0,
        name=tensor.name,
        shape=box.extent,
        numel=box.numel,
        dtype=torch.bfloat16,
        global_offset=box.offset,
        sharding_type=ShardingType.TP_SHARDING if cut else ShardingType.NO_SHARDING,
        num_shards=num_ranks if cut else 1,
        sharding_dim=tensor.cut or 0,
    )
