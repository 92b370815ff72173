"""Small actors for tests: a trainer with a bare module, an engine without a model.

Every process imports this file, so it imports nothing heavier than torch.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ray
import torch
from ray import ObjectRef
from torch import nn

from tests.fleets import zygote
from tests.patience import patient
from weightsync.actors.checkpoints.checkpoint_shard import CheckpointShard
from weightsync.actors.engine import EngineActor
from weightsync.actors.ray.actor_class import actor_class
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.plan import Plan
from weightsync.protocol.messages import Attached, FeedTicket
from weightsync.sources.checkpoint.checkpoint_store import Reading
from weightsync.testing import DictEngine


class Counts(NamedTuple):
    """Resident memory, open files and mapped shared-memory segments of a process."""

    rss_kib: int
    num_files: int
    num_segments: int


def build(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 8))


class Trainer(TrainerShard):
    def __init__(self, width: int, slot: str) -> None:
        super().__init__(slot)
        torch.manual_seed(0)
        self.model = build(width)

    def train(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


class Restless(Trainer):
    """Steps on a thread of its own, as one does that does not wait for updates."""

    _stopped: threading.Event

    def begin(self) -> None:
        self._stopped = threading.Event()
        self._stepping = threading.Thread(target=self._step)
        self._stepping.start()

    @torch.no_grad()
    def _step(self) -> None:
        while not self._stopped.is_set():
            self.model[0].weight.add_(1)

    def end(self) -> None:
        self._stopped.set()
        self._stepping.join()


class Uncounted(Restless):
    """Gives all weights one value, and the next one in each step, in a way that torch does not count."""

    def _step(self) -> None:
        value = 0
        while not self._stopped.is_set():
            value += 1
            for parameter in self.model.parameters():
                parameter.data.fill_(value)


class Modelless(TrainerShard):
    """Forgot to set self.model."""


class Engine(EngineActor):
    def __init__(self, width: int, name: str, slot: str) -> None:
        self._slot, self._layouts = slot, None
        zeros = {name: torch.zeros_like(t) for name, t in build(width).state_dict().items()}
        self._engine = DictEngine(name, zeros)

    async def forget(self) -> None:
        self._engine.resume(0)
        self._served = 0

    async def fail(self, error: Exception) -> None:
        """Fail in each layout from now on."""
        self._engine.layout = mock.Mock(side_effect=error)

    async def fail_to_pause(self, error: Exception) -> None:
        self._engine.pause = mock.Mock(side_effect=error)

    async def weights(self) -> Mapping[str, torch.Tensor]:
        return dict(self._engine.tensors)

    async def counts(self) -> Counts:
        return counts()


def forget(engines: Iterable[Any]) -> None:
    """Have engines serve no version, like new ones. Each test numbers its versions from 1 on."""
    ray.get([engine.forget.remote() for engine in engines])


class Counting(Trainer):
    def counts(self) -> Counts:
        return counts()


def counts() -> Counts:
    """Of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Counts(
        rss_kib=int(status["VmRSS"].split()[0]),
        num_files=len(os.listdir("/proc/self/fd")),
        num_segments=sum("memfd:weightsync" in line for line in maps),
    )


def socket_folders() -> set[Path]:
    """Return the folders with sockets of ours, also those of other tests' processes."""
    return {*Path(tempfile.gettempdir()).glob("weightsync-*")}


class Slowing(Engine):
    async def slow_down(self, seconds: float) -> None:
        """Take so long over a version from now on: all of it over the first tensor."""
        first = next(iter(self._engine.tensors))
        ended = threading.Event()
        self._engine.on_write = lambda tensor: ended.wait(seconds if tensor == first else 0) and None


class Deaf(Engine):
    """Never answers its holder."""

    async def sync_attach(self, plan: object, tickets: object, timeout_s: float, *_: object) -> list[str]:
        await asyncio.sleep(timeout_s)
        return []


class Harming(Engine):
    """Sends a signal to a process, as its holder's, once it has its ticket."""

    _harm: tuple[int, int] | None = None

    async def harm(self, pid: int, number: int) -> None:
        self._harm = pid, number

    async def sync_attach(self, plan: Plan, tickets: Sequence[FeedTicket], *rest: Any) -> Sequence[Attached]:
        if self._harm:
            os.kill(*self._harm)
            self._harm = None
        return await super().sync_attach(plan, tickets, *rest)


class HeldShard(CheckpointShard):
    """One that begins to read when there is a file ``go`` in its folder."""

    def read(self, after: Sequence[ObjectRef[Any]]) -> Reading:
        assert until((Path(self._given[0][0]) / "go").exists, patient(60))
        return super().read(after)


def spawn(cls: type, *args: object) -> Any:
    """Start an actor. One that is given "vllm" is forked from a process that has imported it."""
    imports = {"runtime_env": {"env_vars": {zygote.IMPORTS: "vllm"}}} if "vllm" in args else {}
    return actor_class(cls).options(num_cpus=0, max_restarts=0, **imports).remote(*args)


def until(true: Callable[[], bool], timeout_s: float, pause_s: float = 0.02) -> bool:
    """Whether it came true in time. `pause_s`: how long to wait before each look but the first."""
    deadline = time.monotonic() + timeout_s
    while not (now := true()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return now
