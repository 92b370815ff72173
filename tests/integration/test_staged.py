"""Staged updates: bytes reach the engines' hosts while engines serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.fleets.direct import Direct
from tests.fleets.loop import CONFIG, Loop, drive
from weightsync.driver.engine_state import EngineState
from weightsync.errors import ReadError, TransportError, WeightSyncError
from weightsync.protocol.messages import StagedPart, StageTask

STAGED = replace(CONFIG, stage="host")
Stage = Callable[[StageTask, float], Sequence[StagedPart]]


class Apart(Loop):
    """A loop with each holder on its own host, so that parts are copied between hosts."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.fleet.nodes[:] = [f"host {i}" for i in range(len(self.holders))]


def intercept(loop: Loop, holder: int, make: Callable[[Stage], Stage]) -> Callable[[], None]:
    """Have a holder stage through ``make(stage)``. Returns a function that undoes it."""
    whole = loop.holders[holder].stage
    loop.holders[holder].stage = make(whole)  # type: ignore[method-assign]

    def undo() -> None:
        loop.holders[holder].stage = whole  # type: ignore[method-assign]

    return undo


@pytest.mark.parametrize("cls", [Loop, Apart], ids=["one host", "three hosts"])
def test_engines_serve_until_the_bytes_are_on_their_hosts(cls: type[Loop]) -> None:
    async def work(loop: Loop) -> None:
        serving: list[list[int]] = []

        def watch(stage: Stage) -> Stage:
            def staged(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
                done = stage(task, timeout_s)
                serving.append([engine.serving() for engine in loop.engines.values()])
                return done

            return staged

        await loop.controller.connect()
        for holder in range(len(loop.holders)):
            intercept(loop, holder, watch)
        for version in (1, 2, 3, 4):
            loop.train()
            report = await loop.controller.update(version)
            assert list(report.phases) == ["publish", "stage", "pause", "move", "verify", "commit"]
            assert report.engines == {"e0": version, "e1": version}
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e1")
            assert len(serving) == (3 if cls is Apart else 1)
            assert serving == [[version - 1] * 2] * len(serving)
            serving.clear()
            assert bool(report.bytes_from) == (cls is Apart)

    drive(work, STAGED, cls)


@pytest.mark.parametrize("cls", [Loop, Apart], ids=["one host", "three hosts"])
def test_an_engine_is_refilled_from_what_was_staged(cls: type[Loop]) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            loop.train()
            await loop.controller.update(version)
            loop.engines["e1"].tensors["0.weight"].zero_()
            report = await loop.controller.refill("e1")
            assert report.engines == {"e0": version, "e1": version}
            assert loop.holds_the_models_weights("e1")

    drive(work, STAGED, cls)


def test_wrong_bytes_are_refused_before_any_engine_pauses() -> None:
    async def work(loop: Loop) -> None:
        def corrupt(stage: Stage) -> Stage:
            def staged(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
                return [replace(each, fingerprint=each.fingerprint + 1) for each in stage(task, timeout_s)]

            return staged

        await loop.controller.connect()
        await loop.controller.update(1)
        old = {name: tensor.clone() for name, tensor in loop.engines["e0"].tensors.items()}
        undo = intercept(loop, 2, corrupt)
        loop.train()
        with pytest.raises(TransportError, match=r"version 2: wrong bytes were staged.*holder 2"):
            await loop.controller.update(2)
        assert [engine.serving() for engine in loop.engines.values()] == [1, 1]
        assert {m.record.state for m in loop.fleet.engines.values()} == {EngineState.SERVING}
        assert all((loop.engines["e0"].tensors[name] == tensor).all() for name, tensor in old.items())
        loop.engines["e1"].tensors["0.weight"].zero_()
        await loop.controller.refill("e1")
        assert all((loop.engines["e1"].tensors[name] == tensor).all() for name, tensor in old.items())
        undo()
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e1")

    drive(work, STAGED, Apart)


@pytest.mark.parametrize("error", [TransportError("no memory"), ReadError("holder 0", "it is gone")])
def test_a_holder_that_does_not_stage_stops_nobody_from_serving(error: WeightSyncError) -> None:
    async def work(loop: Loop) -> None:
        def fail(_: Stage) -> Stage:
            def staged(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
                raise error

            return staged

        await loop.controller.connect()
        await loop.controller.update(1)
        undo = intercept(loop, 1, fail)
        with pytest.raises(type(error), match=str(error)):
            await loop.controller.update(2)
        assert [engine.serving() for engine in loop.engines.values()] == [1, 1]
        undo()
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work, STAGED, Apart)


def test_memory_is_reserved_when_it_is_connected_and_not_in_updates() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        reserved: list[int] = []
        for number, holder in enumerate(loop.holders):
            holder.reserve_staged = lambda *_, at=number: reserved.append(at)  # type: ignore[method-assign, misc]
        for version in (1, 2):
            await loop.controller.update(version)
        assert reserved == []

    drive(work, STAGED, Apart)


def test_weights_that_could_be_read_in_place_are_published_to_the_host() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            report = await loop.controller.update(version)
            assert report.phases["stage"] > 0
            assert report.engines == {"e0": version, "e1": version}

    drive(work, STAGED, Direct)
