"""Ranks that train PEFT's adapters with DeepSpeed's engine on the CPU, and publish them."""

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

from tests.contract.deepspeed_ranks import gather, gathered, join_ranks, refusals, train
from tests.contract.source_ranks import plan_for
from tests.forked import fork, import_deepspeed
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.sources import make_source
from weightsync.sources.lora import lora
from weightsync.sources.lora.lora import LoraSource

ADAPTERS = {"default": 3, "second": 5}
"""PEFT's adapters, and the rank of each. DeepSpeed trains the first."""
ALPHA = 4
"""Both adapters'."""


@dataclass(frozen=True)
class Case:
    """ZeRO's settings.

    Attributes:
        stage: 0 to 3.
        threshold: elements of the largest parameter that stays whole.
        offload: where partitions are offloaded to.
        dtype: that of the engines' slots, "" for the parameters' own.
        by_engine: whether the source gets DeepSpeed's engine, and not PEFT's model in it.
        merges: whether the first adapter is merged. It then saves the embedding whole, too.
    """

    stage: int
    threshold: int = 0
    offload: str = "none"
    dtype: str = ""
    by_engine: bool = True
    merges: bool = False


@dataclass(frozen=True)
class Version:
    """What all ranks published of one version, and what it is of.

    Attributes:
        plan: the adapter's, or the model's.
        buffers: bytes of each rank's send buffer.
        saved: ``get_peft_model_state_dict`` within DeepSpeed's own gathering; all of the model, if the
            adapter is merged.
    """

    plan: Plan
    buffers: list[bytes]
    saved: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Found:
    """The versions of each adapter, and what a rank said of parameters that were gathered or changed.

    Where the first adapter is merged, its versions are the model's, and `frozen` travels once.
    """

    versions: dict[str, list[Version]]
    errors: tuple[str, ...]
    frozen: tuple[str, ...] = ()


class Block(nn.Module):
    """Two linear layers, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(7, 11), nn.Linear(11, 7)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = hidden + self.down_proj(self.up_proj(hidden).tanh())
        return changed


class Base(nn.Module):
    """An embedding and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(self.embed(ids))
        return hidden


def adapted(base: nn.Module, saves: bool = False) -> Any:
    """PEFT's model of `base`, with adapters whose B is not zero. The first one may save the embedding."""
    import peft

    configs = {
        name: peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=["up_proj", "down_proj"])
        for name, rank in ADAPTERS.items()
    }
    configs["default"].modules_to_save = ["embed"] if saves else None
    model = peft.get_peft_model(base, configs["default"])
    model.add_adapter("second", configs["second"])
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    return model


@contextmanager
def engine_of(case: Case) -> Iterator[Any]:
    """A DeepSpeed engine that trains the first adapter.

    ZeRO-3 has cut the base before PEFT adapts it, but where PEFT copies a part of it.
    """
    import deepspeed

    zero: dict[str, object] = {"stage": case.stage}
    if case.stage == 3:
        zero |= {"stage3_param_persistence_threshold": case.threshold}
        zero |= {"offload_param": {"device": case.offload}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled
        "zero_allow_untested_optimizer": True,
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=case.stage == 3 and not case.merges):
        base = Base()
    model = adapted(base, case.merges)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.Adam(trained, lr=0.1), config=config)
    yield engine
    engine.destroy()


def run_all(num_ranks: int, cases: list[Case], folder: Path) -> None:
    """Run ranks from a process that has imported DeepSpeed and PEFT."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_deepspeed()
    import deepspeed
    import peft  # noqa: F401

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
    fork(num_ranks, run_ranks, num_ranks, f"{folder}/meeting", cases, folder / "found")


def saved(model: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """What PEFT saves of an adapter, from what DeepSpeed gathers."""
    import deepspeed
    import peft

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found = peft.get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        return {name.removeprefix("base_model.model."): each.clone() for name, each in found.items()}


def source_of(engine: Any, case: Case, adapter: str) -> Any:
    """The source of an adapter, or of the model with the adapter merged."""
    if case.merges:
        return make_source(engine, merge=adapter)
    source = LoraSource(engine if case.by_engine else engine.module, adapter)
    source.cast(case.dtype)
    return source


class Publisher:
    """A source on a rank, attached once, and its versions."""

    def __init__(self, engine: Any, case: Case, adapter: str, rank: int) -> None:
        self._module, self._adapter, self._case = engine.module, adapter, case
        self.source = source_of(engine, case, adapter)
        layouts = gather(self.source.layout())
        self.frozen: tuple[str, ...] = layouts[0].frozen
        self._plan = plan_for(layouts)
        self._buffer = SharedBuffer.create(self._plan.send_buffer_nbytes(rank))
        self.source.attach(self._plan, rank, self._buffer.handle)
        self.versions: list[Version] = []

    def replace(self, engine: Any) -> None:
        """Take the adapter of another engine from now on."""
        self._module = engine.module
        self.source.replace(engine if self._case.by_engine else engine.module)

    def publish(self) -> None:
        """Publish the adapter as it is now."""
        self.source.publish(True)
        buffers = gather(bytes(self._buffer.tensor.numpy()))
        merges = self._case.merges
        of = gathered(self._module) if merges else saved(self._module, self._adapter)
        self.versions.append(Version(self._plan, buffers, of))

    def close(self) -> None:
        self.source.close()
        self._buffer.close()


def run_ranks(rank: int, num_ranks: int, meeting: str, cases: list[Case], out: Path) -> None:
    """One process: for each case train and publish three times; rank 0 saves all versions."""
    join_ranks(rank, num_ranks, meeting)
    found = []
    for case in cases:
        with engine_of(case) as engine:
            found.append(_run(engine, case, rank))
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def _run(engine: Any, case: Case, rank: int) -> Found:
    adapters = ["default"] if case.merges else [*ADAPTERS]
    publishers = {adapter: Publisher(engine, case, adapter, rank) for adapter in adapters}
    for _ in range(3):
        train(engine, rank)
        for each in publishers.values():
            each.publish()
    first = publishers["default"]
    errors: tuple[str, ...] = ()
    with mock.patch.object(lora, "named_tensors", side_effect=AssertionError("slow")):
        first.source.publish(True)  # the step has moved nothing, so it does not look for the adapter again
    if case.stage == 3:
        with engine_of(case) as other:
            train(other, rank)
            first.replace(other)
            first.publish()
            errors = tuple(refusals(other, first.source))
    for each in publishers.values():
        each.close()
    versions = {adapter: each.versions for adapter, each in publishers.items()}
    return Found(versions, errors, first.frozen)
