"""Many small tensors on the host: an update costs a trainer and an engine no Python for each."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.engines.loading.model_folder import ModelFolder
from weightsync.engines.torch.torch_module import TorchEngine
from weightsync.errors import StateError, WeightSyncError
from weightsync.holder.holder import Holder
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalEngine, LocalPeer, LocalTrainer

CONFIG = SyncConfig(timeout_s=patient(15), connect_timeout_s=patient(30))


class Counted:
    """Counts what some methods of an object call, functions of C as well as of Python."""

    def __init__(self, target: object, *methods: str) -> None:
        self.num_calls = 0
        self._target, self._methods = target, methods

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._target, name)
        return lambda *args: self._count(method, *args) if name in self._methods else method(*args)

    def _count(self, method: Callable[..., object], *args: object) -> object:
        def tick(_frame: object, event: str, _arg: object) -> None:
            self.num_calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(tick)
        try:
            return method(*args)
        finally:
            sys.setprofile(before)


def build(num_tensors: int) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ParameterList([nn.Parameter(torch.rand(7)) for _ in range(num_tensors)])
    return model


@contextmanager
def fleet(
    monkeypatch: pytest.MonkeyPatch, num_tensors: int, together: bool
) -> Iterator[tuple[ModuleSource, TorchEngine, Fleet]]:
    """A trainer, and an engine that has the model: on one holder, or each on its own."""
    monkeypatch.setattr(ModelFolder, "build", lambda *_: build(num_tensors))
    source, engine = ModuleSource(build(num_tensors)), TorchEngine("model", "e", {})
    holders = [Holder(f"holder {i}", "127.0.0.1") for i in range(1 if together else 2)]
    member = EngineMember(LocalEngine(Counted(engine, "load")), (len(holders) - 1,))
    trainer = LocalTrainer(Counted(source, "publish"))
    try:
        yield source, engine, Fleet([(trainer, 0)], {"e": member}, [LocalPeer(h) for h in holders])
    finally:
        for part in (source, engine, *holders):
            part.close()


@pytest.mark.parametrize("together", [False, True])
def test_no_call_of_an_update_is_made_for_each_tensor(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    calls: list[tuple[int, int]] = []

    async def drive(source: ModuleSource, engine: TorchEngine, members: Fleet) -> None:
        controller = Controller(CONFIG, members)
        await controller.connect()
        counted = members.trainers[0][0].target, members.engines["e"].peer.target
        for version in (1, 2):
            with torch.no_grad():
                for parameter in source.model.parameters():
                    parameter.normal_()
            for each in counted:
                each.num_calls = 0
            await controller.update(version)
            pairs = zip(source.model.parameters(), engine.model.parameters(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        calls.append((counted[0].num_calls, counted[1].num_calls))

    for num_tensors in (10, 3010):
        with fleet(monkeypatch, num_tensors, together) as (source, engine, members):
            asyncio.run(drive(source, engine, members))
    more = [many - few for few, many in zip(*calls, strict=True)]
    assert max(more) < 1500, calls


def test_an_engine_whose_weights_moved_is_not_written_though_it_was_looked_at_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def drive(engine: TorchEngine, members: Fleet) -> None:
        controller = Controller(CONFIG, members)
        await controller.connect()
        await controller.update(1)
        moved = next(engine.model.parameters())
        moved.data = moved.data.clone()
        engine.layout()
        engine.pause("wait", 1.0)
        with pytest.raises(StateError, match=r"layers\.0 is in other memory"):
            engine.load(2, 1.0)
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"layers\.0 is in other memory"):
            await controller.update(2)
        assert time.monotonic() - started < CONFIG.timeout_s / 4, "its holder waited for it"

    with fleet(monkeypatch, 3, together=False) as (_, engine, members):
        asyncio.run(drive(engine, members))
