"""Holders read a trainer's memory while it is still looked through; what is found then is not served."""

from __future__ import annotations

import pytest
import torch

from tests.fleets.direct import Direct, Source, drive
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineFailed
from weightsync.errors import MovedError, StateError, WeightSyncError
from weightsync.protocol.messages import Published


class Late(Source):
    """Says once, after holders may read, what it has found."""

    finds: WeightSyncError | None = None

    def publish(self, count: bool) -> Published:
        found, self.finds = self.finds, None
        if found:
            raise found
        return super().publish(count)


class Found(Direct):
    source_type = Late

    def finds(self, error: WeightSyncError) -> None:
        assert isinstance(self.source, Late)
        self.source.finds = error


def states(loop: Direct) -> set[EngineState]:
    return {member.record.state for member in loop.fleet.engines.values()}


def test_memory_that_moved_while_it_was_read_is_connected_again_and_engines_take_what_is_there_now() -> None:
    async def work(loop: Direct) -> None:
        assert isinstance(loop, Found)
        await loop.controller.connect()
        await loop.controller.update(1)
        assert loop.controller.plan
        epoch = loop.controller.plan.epoch
        loop.train()
        loop.finds(MovedError("trainer 0: 0.weight is in other memory"))
        report = await loop.controller.update(2)
        assert (report.engines, report.epoch) == ({"e0": 2, "e1": 2}, epoch + 1)
        assert loop.holds_the_models_weights("e0")
        assert loop.holds_the_models_weights("e1")

    drive(work, cls=Found)


def test_another_layout_found_while_it_was_read_is_served_by_nobody_until_connected_again() -> None:
    async def work(loop: Direct) -> None:
        assert isinstance(loop, Found)
        await loop.controller.connect()
        await loop.controller.update(1)
        failed: list[str] = []
        loop.controller.events.subscribe(EngineFailed, lambda event: failed.append(event.name))
        loop.finds(StateError("trainer 0: 2.weight is new: connect() again"))
        with pytest.raises(StateError, match=r"2\.weight is new"):
            await loop.controller.update(2)
        assert states(loop) == {EngineState.STALE}
        assert sorted(failed) == ["e0", "e1"]
        await loop.controller.connect()
        with torch.no_grad():
            loop.model[0].weight.add_(1)  # type: ignore[index, operator]
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e0")

    drive(work, cls=Found)
