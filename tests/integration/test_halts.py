"""Pauses that come late: what an engine does after its caller has given it up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from unittest import mock

import pytest

from tests.fleets.loop import Loop, drive
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.gather import Outcome, gather_named
from weightsync.errors import DeadlineError, EngineError, PeerLostError

PAUSE_S = patient(0.25)
END_S = patient(20)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.driver.engine_group.GRACE_S", 0.1)


class Stopped:
    """Calls of `method` of e1 wait, as those of a process that was stopped, until `go_on`."""

    def __init__(self, loop: Loop, method: str = "pause") -> None:
        self._engine = loop.engines["e1"]
        self.call, self._going = getattr(self._engine, method), threading.Event()
        self.fails: Exception | None = None
        self.num_calls = 0
        setattr(self._engine, method, self._late)
        self._method = method

    def _late(self, *args: object) -> None:
        self.num_calls += 1
        assert self._going.wait(END_S)
        if self.fails:
            raise self.fails
        self.call(*args)

    def go_on(self) -> None:
        self._going.set()


def state(loop: Loop) -> EngineState:
    return loop.fleet.engines["e1"].record.state


async def until(true: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not true():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), END_S)


async def nothing_runs() -> None:
    """What engines did late has been undone."""
    deadline = time.monotonic() + END_S
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        assert time.monotonic() < deadline, others
        await asyncio.wait(others, timeout=END_S)


async def impatient(calls: Mapping[str, Coroutine[Any, Any, T]], phase: str, timeout_s: float) -> Outcome[T]:
    """As `gather_named`, with little time for who is to stop."""
    return await gather_named(calls, phase, PAUSE_S if phase in ("pause", "sleep") else timeout_s)


def connected(work: Callable[[Loop], Coroutine[object, object, None]]) -> None:
    """`work` with a fleet that serves version 1."""

    async def begin(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        with mock.patch("weightsync.driver.engine_group.gather_named", impatient):
            await work(loop)

    drive(begin, SyncConfig(bucket_bytes=4096, timeout_s=END_S))


def test_a_pause_that_comes_late_is_undone_without_an_update() -> None:
    async def work(loop: Loop) -> None:
        stopped = Stopped(loop)
        for version in (2, 3):  # the second waits for the first one's answer and asks nothing more
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": 1}
            assert report.states["e1"] == "PAUSING"
            assert state(loop) is EngineState.PAUSING
        assert stopped.num_calls == 1
        stopped.go_on()
        await until(lambda: state(loop) is EngineState.SERVING)
        assert loop.engines["e1"].generate([[1]], {}).version == 1
        assert (await loop.controller.update(4)).engines == {"e0": 4, "e1": 4}

    connected(work)


def test_an_update_that_fails_later_does_not_blame_the_engine_that_did_not_pause() -> None:
    async def work(loop: Loop) -> None:
        stopped = Stopped(loop)
        loop.engines["e0"].on_write = mock.Mock(side_effect=EngineError("e0", "load", "no memory", 0))
        with pytest.raises(EngineError, match=r"engine e0.*no memory"):
            await loop.controller.update(2)
        stopped.go_on()
        await until(lambda: state(loop) is EngineState.SERVING)

    connected(work)


def test_a_late_pause_is_not_undone_under_an_update_that_took_the_engine() -> None:
    async def work(loop: Loop) -> None:
        stopped, resumed = Stopped(loop), []
        resume = loop.engines["e1"].resume
        loop.engines["e1"].resume = lambda version: (resumed.append(version), resume(version))[1]
        await loop.controller.update(2)
        loop.engines["e1"].on_write = lambda _: stopped_writes.append(loop.engines["e1"].paused)
        stopped_writes: list[bool] = []
        async with loop.controller.exclusive():
            updating = asyncio.ensure_future(loop.controller.update(3))
            await asyncio.sleep(0)
            stopped.go_on()
            assert (await updating).engines == {"e0": 3, "e1": 3}
        await nothing_runs()
        assert resumed == [3]
        assert all(stopped_writes)
        assert state(loop) is EngineState.SERVING
        assert loop.engines["e1"].generate([[1]], {}).version == 3

    connected(work)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DeadlineError("pause (wait)", ("engine e1",), 0.2), EngineState.SERVING),
        (EngineError("e1", "pause", "its ranks did not settle"), EngineState.SERVING),
        (PeerLostError("engine e1", "killed"), EngineState.DEAD),
    ],
    ids=["it gave up itself", "it failed", "it is gone"],
)
def test_what_a_late_pause_says_decides_what_becomes_of_the_engine(
    error: Exception, outcome: EngineState
) -> None:
    async def work(loop: Loop) -> None:
        stopped = Stopped(loop)
        stopped.fails = error
        await loop.controller.update(2)
        assert state(loop) is EngineState.PAUSING
        stopped.go_on()
        await until(lambda: state(loop) is outcome)
        assert loop.engines["e1"].serving() == 1

    connected(work)


def test_an_engine_that_failed_after_it_paused_goes_on() -> None:
    async def work(loop: Loop) -> None:
        engine = loop.engines["e1"]

        def pause(mode: str, timeout_s: float) -> None:
            engine.paused = True
            raise EngineError("e1", "pause", "its ranks did not settle")

        engine.pause = pause
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 1}
        await until(lambda: state(loop) is EngineState.SERVING)
        assert engine.generate([[1]], {}).version == 1

    connected(work)


@pytest.mark.parametrize(("level", "version"), [(1, 1), (2, 0)])
def test_an_engine_that_falls_asleep_late_is_known_to_sleep(level: int, version: int) -> None:
    async def work(loop: Loop) -> None:
        stopped = Stopped(loop, "sleep")
        with pytest.raises(DeadlineError, match="engine e1"):
            await loop.controller.sleep(["e1"], level)
        assert state(loop) is EngineState.PAUSING
        stopped.go_on()
        await until(lambda: state(loop) is EngineState.ASLEEP)
        assert loop.fleet.engines["e1"].record.version == version
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    connected(work)


def test_another_actor_of_the_same_name_does_not_wait_for_the_pause_of_the_first() -> None:
    async def work(loop: Loop) -> None:
        stopped, broken = Stopped(loop), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
        await loop.controller.update(2)
        member = loop.fleet.engines["e1"]
        member.record = type(member.record)()
        loop.engines["e1"].pause = stopped.call
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 3}
        stopped.fails = EngineError("e1", "pause", "of the first")
        stopped.go_on()
        await nothing_runs()
        assert (state(loop), broken) == (EngineState.SERVING, [])

    connected(work)
