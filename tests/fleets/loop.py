"""A trainer and engines in one process, with real holders, sockets and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

import torch
from torch import nn

from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.holder.holder import Holder
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.plan import Plan
from weightsync.sources.module import ModuleSource
from weightsync.testing import DictEngine, LocalEngine, LocalPeer, LocalTrainer


class Loop:
    """One model, a trainer and two engines, each with its own holder."""

    frozen: Sequence[str] = ()

    def __init__(self, config: SyncConfig, num_engines: int = 2) -> None:
        self.model = self.make()
        zeros = {name: torch.zeros_like(t) for name, t in self.model.state_dict().items()}
        self.engines = {
            f"e{i}": DictEngine(f"e{i}", {n: t.clone() for n, t in zeros.items()}) for i in range(num_engines)
        }
        self.holders = [
            Holder(f"holder {i}", "127.0.0.1", make_staging=partial(self.stage, i))
            for i in range(num_engines + 1)
        ]
        self.source = self.source_of(self.model)
        members = {
            name: EngineMember(LocalEngine(e), (i + 1,)) for i, (name, e) in enumerate(self.engines.items())
        }
        self.fleet = Fleet([(LocalTrainer(self.source), 0)], members, [LocalPeer(h) for h in self.holders])
        self.controller = Controller(config, self.fleet)

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5))

    def source_of(self, model: nn.Module) -> ModuleSource:
        return ModuleSource(model, frozen=self.frozen)

    def stage(
        self, holder: int, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool
    ) -> HostStaging:
        """Make the staging of holder number `holder`."""
        return HostStaging(plan, index, send_buffer, receives)

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_()

    def holds_the_models_weights(self, name: str) -> bool:
        return all(torch.equal(t, self.engines[name].tensors[n]) for n, t in self.model.state_dict().items())

    def close(self) -> None:
        self.source.close()
        for part in (*self.engines.values(), *self.holders):
            part.close()


CONFIG = SyncConfig(bucket_bytes=4096, timeout_s=patient(15), connect_timeout_s=patient(20))


def drive(
    work: Callable[[Loop], Coroutine[object, object, None]],
    config: SyncConfig = CONFIG,
    cls: type[Loop] = Loop,
) -> None:
    loop = cls(config)
    try:
        asyncio.run(work(loop))
    finally:
        loop.close()
