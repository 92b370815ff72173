"""Weights that trainers push from host memory, over real holders, sockets and shared memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop, drive
from tests.patience import patient
from weightsync.errors import NonfiniteError, SourceChangedError
from weightsync.plan import Plan
from weightsync.protocol.handles import BufferHandle, PushTicket
from weightsync.protocol.messages import Attached, Published
from weightsync.sources.module import ModuleSource

PUSHING = replace(CONFIG, keep_versions=1, host_weights="push")
"""Without copies to heal from, weights of trainers that can push are pushed."""


class PushingSource(ModuleSource):
    """Pushes to a holder in host memory, too. `before_digest` is called while holders may ask."""

    ways: tuple[str, ...] = ()
    before_digest: Callable[[], None] = staticmethod(lambda: None)

    def can_push(self) -> bool:
        return True

    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        self.ways += ("published",)
        return super().attach(plan, trainer, send_buffer)

    def attach_push(self, plan: Plan, trainer: int, ticket: PushTicket) -> Attached:
        self.ways += ("pushed",)
        return super().attach_push(plan, trainer, ticket)

    def publish(self, count: bool) -> Published:
        self.before_digest()
        return super().publish(count)


class Pushing(Loop):
    def source_of(self, model: nn.Module) -> ModuleSource:
        return PushingSource(model, frozen=self.frozen)


class Striped(Pushing):
    """Its weights are not contiguous, but for biases."""

    def make(self) -> nn.Module:
        model = super().make()
        for name, parameter in [*model.named_parameters()]:
            if name.endswith("weight"):
                parameter.data = parameter.data.t().contiguous().t()
        return model


def source(loop: Loop) -> PushingSource:
    assert isinstance(loop.source, PushingSource)
    return loop.source


@pytest.mark.parametrize("cls", [Pushing, Striped])
def test_each_version_arrives_bit_for_bit(cls: type[Loop]) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        for version in (1, 2, 5):
            loop.train()
            report = await loop.controller.update(version)
            assert report.verified
            assert report.engines == {"e0": version, "e1": version}
            assert all(map(loop.holds_the_models_weights, loop.engines))
        assert source(loop).ways == ("pushed",)

    drive(work, PUSHING, cls)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"keep_versions": 2}, "holders do not map every engine's memory, and sync.keep_versions is 2"),
        ({"keep_versions": 2, "stage": "host"}, "sync.stage is host"),
        ({"host_weights": "copy"}, ""),
    ],
)
def test_weights_that_cannot_be_pushed_are_copied_and_the_log_says_why(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        assert source(loop).ways == ("published",)

    drive(work, replace(PUSHING, **settings), Pushing)
    assert (f"weights on the host are copied before they move: {reason}" in caplog.text) == bool(reason)


class Half(Pushing):
    """The trainer's weights are in bfloat16, the engines' in float32."""

    def source_of(self, model: nn.Module) -> ModuleSource:
        return PushingSource(copy.deepcopy(model).bfloat16(), frozen=self.frozen)


def test_weights_that_need_a_cast_are_copied(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        assert (await loop.controller.update(1)).verified
        assert source(loop).ways == ("published",)

    drive(work, PUSHING, Half)
    assert "0.bias has another dtype in the engines" in caplog.text


def test_tensors_that_moved_are_pushed_from_where_they_are_now() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        for version in (1, 2, 3):
            for parameter in loop.model.parameters():
                parameter.data = torch.randn_like(parameter)
            assert (await loop.controller.update(version)).verified
            assert all(map(loop.holds_the_models_weights, loop.engines))
        assert source(loop).ways == ("pushed",)

    drive(work, PUSHING, Pushing)


@pytest.mark.parametrize("times", [1, 2])
def test_weights_that_change_while_they_are_pushed_are_not_served(times: int) -> None:
    """They are moved once more. If they change again meanwhile, the update fails and says so."""

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        arrived, left = threading.Event(), [*range(times)]
        for engine in loop.engines.values():
            engine.on_write = lambda _: arrived.set()

        def change() -> None:
            if left:
                left.pop()
                assert arrived.wait(patient(10))
                loop.train()

        source(loop).before_digest = change
        if times == 1:
            assert (await loop.controller.update(2)).verified
        else:
            with pytest.raises(SourceChangedError, match=r"trainer 0 wrote 0\.weight"):
                await loop.controller.update(2)
            assert {engine.version for engine in loop.engines.values()} == {1}
            loop.train()
            assert (await loop.controller.update(3)).verified
        assert all(map(loop.holds_the_models_weights, loop.engines))

    drive(work, PUSHING, Pushing)


@pytest.mark.parametrize("name", ["0.weight", "1.bias"])
def test_a_nan_in_what_is_pushed_is_found(name: str) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        loop.train()
        with torch.no_grad():
            loop.model.get_parameter(name).view(-1)[-1] = float("nan")
        with pytest.raises(NonfiniteError, match=name):
            await loop.controller.update(1)

    drive(work, replace(PUSHING, nonfinite="refuse"), Pushing)


def test_an_engine_that_stops_in_a_push_leaves_nothing_behind() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()

        def fail(_: str) -> None:
            raise MemoryError

        loop.train()
        loop.engines["e1"].on_write = fail
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 0}
        loop.engines["e1"].on_write = lambda _: None
        loop.train()
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert all(map(loop.holds_the_models_weights, loop.engines))

    drive(work, PUSHING, Pushing)
