"""Who heals an engine, and what comes of it when more goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from tests.fleets.loop import Loop, drive
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineBack
from weightsync.driver.fleet import EngineMember
from weightsync.driver.healing.healing import Healer
from weightsync.errors import (
    DeadlineError,
    EngineError,
    PeerLostError,
    RankLostError,
    SlowError,
    StateError,
    TransportError,
    WeightSyncError,
    Where,
)
from weightsync.holder.holder import Holder
from weightsync.testing import LocalEngine

CONFIG = SyncConfig(
    bucket_bytes=4096, timeout_s=patient(15), connect_timeout_s=patient(20), heal_backoff_s=0.01
)
GONE = PeerLostError("engine e1", "killed")


class Respawned:
    """The same engine in a new seat, as a new process would have; `before` may fail."""

    def __init__(self, loop: Loop, before: Callable[[], Awaitable[None]] | None = None) -> None:
        self._loop, self.before = loop, before
        self.times = 0

    async def __call__(self, name: str) -> bool:
        self.times += 1
        if self.before:
            await self.before()
        self._loop.engines[name].serving = False
        old = self._loop.fleet.engines[name]
        self._loop.fleet.engines[name] = EngineMember(LocalEngine(self._loop.engines[name]), old.holders)
        return True


def _healer(
    loop: Loop,
    respawn: Callable[[str], Awaitable[bool]],
    can_respawn: bool = True,
    rejoin: Callable[[str], Awaitable[None]] | None = None,
    config: SyncConfig = CONFIG,
) -> Healer:
    return Healer(config, loop.fleet, loop.controller, respawn, lambda _: can_respawn, rejoin or respawn)


async def _healed(healer: Healer) -> None:
    deadline = time.monotonic() + patient(20)
    while healer.busy():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def state(loop: Loop) -> EngineState:
    return loop.fleet.engines["e1"].record.state


def test_one_that_was_only_cut_off_is_filled_and_no_new_process_is_reported() -> None:
    async def work(loop: Loop) -> None:
        async def heard(name: str) -> bool:
            await Respawned(loop)(name)
            return False

        healer = _healer(loop, heard)
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.controller.engine_group.lost("e1", DeadlineError("heartbeat", ("engine e1",), 1.0))
        await _healed(healer)
        (heal,) = healer.heals
        assert (heal.version, heal.respawned_at, heal.verified) == (1, None, True)
        assert "new process" not in str(heal)

    drive(work)


def test_one_that_an_update_brings_back_first_keeps_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Loop) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await loop.controller.connect()
        await loop.controller.update(1)
        monkeypatch.setattr(loop.controller, "can_refill", lambda _: False)
        async with loop.controller.exclusive():
            loop.controller.engine_group.enter(["e1"], EngineState.STALE)
            healer.engine_failed("e1", StateError("its weights could not be verified"))
            await asyncio.sleep(0)
            await loop.controller.update(2)
        await _healed(healer)
        assert (respawn.times, state(loop), healer.given_up) == (0, EngineState.SERVING, {})
        assert [heal.version for heal in healer.heals] == [2]

    drive(work)


def test_one_that_is_slow_and_then_found_dead_before_it_is_filled_gets_a_new_process() -> None:
    """As one that was killed, where Ray says so after the holder has given it up."""

    async def work(loop: Loop) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await loop.controller.connect()
        await loop.controller.update(1)
        async with loop.controller.exclusive():  # nothing is decided while an update runs
            loop.controller.engine_group.enter(["e1"], EngineState.STALE)
            healer.engine_failed("e1", SlowError("reading of bucket 4", ("engine e1",), 2.0))
            await asyncio.sleep(0)
            loop.controller.engine_group.lost("e1", GONE)
        await _healed(healer)
        assert (respawn.times, state(loop), healer.given_up) == (1, EngineState.SERVING, {})
        assert loop.engines["e1"].generate([[1]], {}).version == 1

    drive(work)


@pytest.mark.parametrize(
    "late",
    [
        TransportError("holder 2 gave up"),
        DeadlineError("move", ("holder 2",), 2.0),
        EngineError("e1", "move", "its feed is closed"),
        StateError("engine e1 is closed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_one_that_stalls_and_wakes_while_the_update_still_runs_is_respawned(late: WeightSyncError) -> None:
    async def work(loop: Loop) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await loop.controller.connect()
        await loop.controller.update(1)
        async with loop.controller.exclusive():
            loop.controller.engine_group.lost("e1", DeadlineError("heartbeat", ("engine e1",), 1.0))
            await asyncio.sleep(0)
            loop.controller.engine_group.blame("move", {"e1": late})  # what it says once it wakes
        await _healed(healer)
        assert (respawn.times, state(loop), healer.given_up) == (1, EngineState.SERVING, {})

    drive(work)


def test_an_engine_that_is_lost_while_it_is_filled_is_healed_once_more() -> None:
    async def work(loop: Loop) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await loop.controller.connect()
        await loop.controller.update(1)
        running = asyncio.get_running_loop()

        def lose(_: str) -> None:
            loop.engines["e1"].on_write = lambda _: None
            deaf = DeadlineError("heartbeat", ("engine e1",), 1.0)
            noticed = threading.Event()
            running.call_soon_threadsafe(loop.controller.engine_group.lost, "e1", deaf)
            running.call_soon_threadsafe(noticed.set)
            assert noticed.wait(patient(5))

        async def lost_again() -> None:
            if respawn.times == 1:
                loop.engines["e1"].on_write = lose

        respawn.before = lost_again
        loop.controller.engine_group.lost("e1", GONE)
        await _healed(healer)
        assert respawn.times == 2
        assert state(loop) is EngineState.SERVING
        assert [heal.version for heal in healer.heals] == [1]
        assert loop.engines["e1"].generate([[1]], {}).version == 1

    drive(work, CONFIG)


def test_what_the_callers_code_raises_is_one_attempt_and_not_the_end() -> None:
    async def work(loop: Loop) -> None:
        async def fail() -> None:
            if respawn.times < 3:
                raise KeyError("no host is free")

        respawn = Respawned(loop, fail)
        healer = _healer(loop, respawn)
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.controller.engine_group.lost("e1", GONE)
        await _healed(healer)
        assert respawn.times == 3
        assert state(loop) is EngineState.SERVING
        respawn.before = refuse
        loop.controller.engine_group.lost("e1", GONE)
        await _healed(healer)
        assert respawn.times == 3 + CONFIG.heal_attempts
        assert "no host is free" in str(healer.given_up["e1"])

    async def refuse() -> None:
        raise KeyError("no host is free")

    drive(work, CONFIG)


def test_a_deaf_engine_that_nobody_can_start_anew_does_not_answer_again() -> None:
    async def work(loop: Loop) -> None:
        healer = _healer(loop, Respawned(loop), can_respawn=False)
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.engines["e1"].serving = False
        loop.controller.engine_group.lost("e1", DeadlineError("heartbeat", ("engine e1",), 1.0))
        await _healed(healer)
        assert "e1" in healer.given_up
        assert not healer.heals
        assert state(loop) is EngineState.DEAD
        assert not loop.engines["e1"].serving

    drive(work, CONFIG)


@pytest.mark.parametrize("heal_attempts", [0, 2])
@pytest.mark.parametrize("case", ["dead", "slow", "replaced"])
def test_holders_let_go_of_a_dead_engine_that_nobody_starts_anew(
    case: str, heal_attempts: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its memory stays taken, which the next engine on its GPU needs."""

    async def work(loop: Loop) -> None:
        config = replace(CONFIG, heal_attempts=heal_attempts)
        healer = _healer(loop, Respawned(loop), can_respawn=False, config=config)
        await loop.controller.connect()
        await loop.controller.update(1)
        links: list[tuple[str, object]] = []
        monkeypatch.setattr(Holder, "link", lambda holder, engine: links.append((holder.name, engine)))
        monkeypatch.setattr(loop.controller, "can_refill", lambda _: False)
        if case == "replaced":
            loop.fleet.engines["e2"] = EngineMember(LocalEngine(loop.engines["e1"]), (2,))
        if case == "slow":
            loop.controller.engine_group.enter(["e1"], EngineState.STALE)
            healer.engine_failed("e1", SlowError("reading", ("engine e1",), 2.0))
        else:
            loop.controller.engine_group.lost("e1", GONE)
        await _healed(healer)
        assert links == ([("holder 2", None)] if case == "dead" else [])
        assert ("killed; start its server again, bring another with add_engine()" in caplog.text) == (
            case != "slow" and heal_attempts > 0
        )

    drive(work)


def test_one_that_answers_again_is_taken_in_without_being_started_anew() -> None:
    async def work(loop: Loop) -> None:
        respawn = Respawned(loop)
        refused = [DeadlineError("start", ("engine e1",), 1.0)]

        async def rejoin(name: str) -> None:
            if refused:
                raise refused.pop()
            member = loop.fleet.engines[name]
            loop.fleet.engines[name] = EngineMember(member.peer, member.holders)
            loop.controller.engine_group.enter([name], EngineState.STALE)

        healer = _healer(loop, respawn, can_respawn=False, rejoin=rejoin)
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.controller.events.publish(EngineBack("e1"))
        assert not healer.busy(), "it serves"
        loop.controller.engine_group.lost("e1", DeadlineError("heartbeat", ("engine e1",), 1.0))
        loop.controller.events.publish(EngineBack("e1"))
        await _healed(healer)
        assert state(loop) is EngineState.DEAD, "its healing had its way, and gave it up"
        loop.controller.events.publish(EngineBack("e1"))
        await _healed(healer)
        assert state(loop) is EngineState.DEAD, "it was not reached once more"
        loop.controller.events.publish(EngineBack("e1"))
        await _healed(healer)
        assert state(loop) is EngineState.SERVING
        assert [heal.version for heal in healer.heals] == [1]
        assert not healer.given_up

    drive(work, CONFIG)


def test_an_engine_that_lost_a_rank_is_dead_and_started_anew_at_once() -> None:
    async def work(loop: Loop) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await loop.controller.connect()
        await loop.controller.update(1)
        lost = RankLostError("e1", "watch", "killed", 1)

        def lose(_: str) -> None:
            loop.engines["e1"].on_write = lambda _: None
            raise lost

        loop.engines["e1"].on_write = lose
        loop.train()
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 0}
        assert lost.where == Where("e1", 1, 2, "move")
        await _healed(healer)
        assert (respawn.times, state(loop)) == (1, EngineState.SERVING)
        loop.controller.engine_group.lost("e1", lost)
        assert lost.where == Where("e1", 1, 2, "idle")
        await _healed(healer)
        assert (respawn.times, state(loop)) == (2, EngineState.SERVING)
        assert loop.holds_the_models_weights("e1")

    drive(work, CONFIG)


def test_an_engine_that_leaves_is_not_brought_back() -> None:
    async def work(loop: Loop) -> None:
        begun = asyncio.Event()

        async def forever() -> None:
            begun.set()
            await asyncio.Event().wait()

        healer = _healer(loop, Respawned(loop, forever))
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.controller.engine_group.lost("e1", GONE)
        await begun.wait()
        healer.forget("e1")
        await _healed(healer)
        assert not healer.heals
        assert not healer.given_up

    drive(work, CONFIG)


def test_an_update_that_comes_between_connecting_and_filling_is_what_the_engine_gets() -> None:
    async def work(loop: Loop) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await loop.controller.connect()
        await loop.controller.update(1)
        adopt, updates = loop.controller.adopt, []

        async def update(inside: asyncio.Event) -> None:
            async with loop.controller.exclusive():
                inside.set()
                await asyncio.sleep(0.1)  # so that the filling waits for its turn
                await loop.controller.connect()
                await loop.controller.update(3)

        async def adopt_then_update(name: str) -> None:
            await adopt(name)
            if not updates:
                inside = asyncio.Event()
                updates.append(asyncio.create_task(update(inside)))
                await inside.wait()

        def fail(_: str) -> None:
            loop.engines["e1"].on_write = lambda _: None
            raise MemoryError

        loop.controller.adopt = adopt_then_update
        loop.engines["e1"].on_write = fail
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 0}
        await _healed(healer)
        await updates[0]
        assert respawn.times == 0
        assert loop.fleet.engines["e1"].record.version == 3
        assert loop.holds_the_models_weights("e1")
        assert (await loop.controller.update(4)).engines == {"e0": 4, "e1": 4}

    drive(work, CONFIG)


def test_a_heal_takes_as_long_as_it_took_though_the_wall_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = time.time

    async def work(loop: Loop) -> None:
        async def set_back() -> None:
            monkeypatch.setattr(time, "time", lambda: real() - 3600)

        healer = _healer(loop, Respawned(loop, set_back))
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.controller.engine_group.lost("e1", GONE)
        await _healed(healer)
        (heal,) = healer.heals
        assert heal.respawned_at is not None
        assert heal.serving_at is not None
        assert heal.died_at < heal.respawned_at < heal.serving_at < heal.died_at + 60
        assert abs(heal.died_at - real()) < 60
        assert "after -" not in str(heal)
        loop.train()
        report = await loop.controller.update(2)
        assert 0 < report.seconds < 60
        assert all(0 <= seconds < 60 for seconds in report.phases.values())

    drive(work, CONFIG)


def respawned_unconnected(loop: Loop, name: str) -> None:
    """Put a new process in the place of an engine, as if it was given up before it was connected."""
    loop.engines[name].pause("keep", 0)
    member = loop.fleet.engines[name]
    loop.fleet.engines[name] = EngineMember(LocalEngine(loop.engines[name]), member.holders)


def test_an_engine_that_was_given_up_before_it_was_connected_is_connected_after_the_next_update() -> None:
    async def work(loop: Loop) -> None:
        healer = _healer(loop, Respawned(loop))
        await loop.controller.connect()
        await loop.controller.update(1)
        respawned_unconnected(loop, "e1")
        attach, loop.engines["e1"].attach = (
            loop.engines["e1"].attach,
            Mock(side_effect=EngineError("e1", "", "")),
        )
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 0}
        await _healed(healer)
        assert state(loop) is EngineState.EMPTY
        loop.engines["e1"].attach = attach  # type: ignore[method-assign]
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 0}
        await _healed(healer)
        assert (state(loop), healer.heals[-1].version) == (EngineState.SERVING, 3)
        assert loop.holds_the_models_weights("e1")
        assert (await loop.controller.update(4)).engines == {"e0": 4, "e1": 4}

    drive(work)


def test_if_too_few_engines_are_connected_an_update_connects_them() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        for name in ("e0", "e1"):
            respawned_unconnected(loop, name)
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work)


def test_an_engine_with_a_version_that_too_few_others_have_is_filled_with_the_one_before() -> None:
    config = replace(CONFIG, min_engines=2)

    async def work(loop: Loop) -> None:
        healer = _healer(loop, Respawned(loop), config=config)
        await loop.controller.connect()
        await loop.controller.update(1)
        kept = {name: each.clone() for name, each in loop.model.state_dict().items()}
        loop.train()
        loop.engines["e1"].on_write = Mock(side_effect=[RuntimeError("no memory"), *[None] * 100])
        with pytest.raises(EngineError, match=r"engine e1.*no memory"):
            await loop.controller.update(2)
        await _healed(healer)
        assert {each.record.version for each in loop.fleet.engines.values()} == {1}
        for engine in loop.engines.values():
            assert all(torch.equal(engine.tensors[name], each) for name, each in kept.items())

    drive(work, config)
