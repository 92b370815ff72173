"""Ranks that train with DeepSpeed's engine on the CPU, and publish what it holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.contract.source_ranks import Model, Share, plan_for, publish
from tests.forked import fork, import_deepspeed
from weightsync.errors import WeightSyncError
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan, RankLayout
from weightsync.sources import ModelSource, make_source

Case = tuple[int, int, str]


@dataclass(frozen=True)
class Version:
    """What all ranks published of one version, and what DeepSpeed's own gathering gives."""

    plan: Plan
    shares: list[Share]
    whole: dict[str, torch.Tensor]
    errors: tuple[str, ...] = ()


@contextmanager
def engine_of(stage: int, threshold: int = 0, offload: str = "none") -> Iterator[Any]:
    """A DeepSpeed engine over a tiny model, in a process group that exists."""
    import deepspeed

    zero: dict[str, object] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": threshold}
        zero |= (
            {"zero_hpz_partition_size": dist.get_world_size()}
            if offload == "secondary"
            else {"offload_param": {"device": offload}}
        )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    yield engine
    engine.destroy()


def run_all(num_ranks: int, cases: list[Case], folder: Path) -> None:
    """Run ranks from a process that has imported DeepSpeed, which takes seconds of a core.

    After all cases, they measure what a large model takes.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_deepspeed()
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
    fork(num_ranks, run_ranks, num_ranks, f"{folder}/meeting", cases, folder / "versions")
    fork(num_ranks, measure, num_ranks, f"{folder}/second meeting", folder / "memory")


def join_ranks(rank: int, num_ranks: int, meeting: str) -> None:
    """Make the process group that DeepSpeed will use."""
    import deepspeed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    deepspeed.init_distributed("gloo")


def train(engine: Any, rank: int) -> None:
    """One step, and a forward pass after it, which may leave parameters gathered."""
    loss = engine(torch.tensor([rank, 5])).float().pow(2).sum()
    engine.backward(loss)
    engine.step()
    with torch.no_grad():
        engine(torch.tensor([1]))


def gathered(module: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors, by DeepSpeed's own gathering."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def gather(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def offloaded(engine: Any, plan: Plan, rank: int) -> Version:
    """Train, release all partitions, publish, and restore them."""
    train(engine, rank)
    source = make_source(engine, offloads=True)
    source.layout()
    share, _ = publish(source, plan, rank, offload=True)
    parts = [parameter.ds_tensor for parameter in engine.module.parameters()]
    assert {part.untyped_storage().nbytes() for part in parts} == {0}
    source.onload()  # type: ignore[attr-defined]
    return Version(plan, gather(share), gathered(engine.module))


def refusals(engine: Any, source: ModelSource) -> Iterator[str]:
    """What a rank says when it is asked while parameters are gathered or changed."""
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield refusal(source)
    with torch.no_grad():
        engine(torch.tensor([1]))
    for parameter in parameters:
        if parameter.ds_status.name == "AVAILABLE":
            parameter.data += 1
    yield refusal(source)
    engine.empty_partition_cache()
    yield refusal(source)


def refusal(source: ModelSource) -> str:
    try:
        source.layout()
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def run_ranks(rank: int, num_ranks: int, meeting: str, cases: list[Case], out: Path) -> None:
    """One process: for each case train and publish three times; rank 0 saves all versions."""
    join_ranks(rank, num_ranks, meeting)
    found: list[list[Version]] = []
    for stage, threshold, offload in cases:
        with engine_of(stage, threshold, offload) as engine:
            source = make_source(engine, (), offloads=False)
            layouts: list[RankLayout] = gather(source.layout())
            plan, versions = plan_for(layouts), []
            for _ in range(3):
                train(engine, rank)
                share, _ = publish(source, plan, rank)
                versions.append(Version(plan, gather(share), gathered(engine.module)))
            if stage == 3:
                versions.append(offloaded(engine, plan, rank))
                versions.append(Version(plan, [], {}, tuple(refusals(engine, source))))
            found.append(versions)
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Memory:
    """Bytes of a model and of a rank's send buffer, and what publishing took beyond them."""

    model: int
    send_buffer: int
    extra: int


def measure(rank: int, num_ranks: int, meeting: str, out: Path) -> None:
    """One process: publish a large model twice, and measure the second time."""
    import deepspeed

    join_ranks(rank, num_ranks, meeting)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    source = make_source(engine)
    plan = plan_for(gather(source.layout()), bucket_bytes=8 << 20)
    nbytes = plan.send_buffer_nbytes(rank)
    send_buffer = SharedBuffer.create(nbytes)
    source.attach(plan, rank, send_buffer.handle)
    source.publish(True)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    with mock.patch("weightsync.sources.zero.deepspeed.named_tensors", side_effect=AssertionError("slow")):
        source.publish(True)  # addresses are as before, so it does not look for tensors again
    found = gather(Memory(plan.total_nbytes, nbytes, _memory("VmHWM") - before))
    source.close()
    send_buffer.close()
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def _memory(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
