"""A driver is killed, and the next one goes on with what it left; one WeightSync at a time has an actor."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.fleets.actors import Engine, Trainer, forget, spawn, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ConfigError, StateError

PHASES = ("publish", "pause", "move", "verify", "commit", "keep", "refill")


class Process:
    """A cluster, or a driver."""

    def __init__(self, module: str, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.fleets.{module}", *args],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def reports(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.says())
        return report

    def ended(self) -> None:
        """It has killed itself."""
        assert self._process.wait(timeout=patient(60)) == -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Let it end, once what it has to say has been read."""
        self._process.communicate(timeout=patient(60))


@contextmanager
def process(module: str, *args: str) -> Iterator[Process]:
    running = Process(module, *args)
    try:
        yield running
        running.close()
    finally:
        running.kill()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with process("lasting_cluster") as lasting:
        yield lasting.says()


@pytest.mark.faults
@pytest.mark.timeout(120)
def test_the_next_driver_goes_on_where_the_last_was_killed(address: str) -> None:
    with process("lasting", "first", address) as first:
        before = first.reports()
        assert before["version"] == 3
        first.kill()  # idle
    with process("lasting", "second", address) as second:
        found = second.reports()
        assert found == before, "nobody was started, written or lost"
        midway = second.reports()
        assert midway["version"] == 4
        assert midway["states"]["e1"] == "WRITING"
        assert not midway["exact"]["e1"]
        second.kill()  # an engine still waits in a bucket of version 5
    os.kill(before["pids"]["e0"], signal.SIGKILL)
    with process("lasting", "third", address) as third:
        found = third.reports()
        assert found["version"] == 4
        assert found["engines"] == {"e0": 4, "e1": 4}
        assert found["serving"] == ["e0", "e1"]
        assert found["exact"] == {"e0": True, "e1": True}
        assert found["loads"] == {"e0": 1, "e1": 6}
        others = before["pids"].keys() - {"e0"}
        assert {name: found["pids"][name] for name in others} == {
            name: before["pids"][name] for name in others
        }
        updated = third.reports()
        assert updated["version"] == 5
        assert updated["exact"] == {"e0": True, "e1": True}
        ended = third.reports()
    names = [name.removeprefix("weightsync/lasting/") for name in ended["left"]]
    assert names == ["engine e0", "engine e1", "trainer 0", "trainer 1"]
    assert ended["after"] == []
    _gone(*before["pids"].values())


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_driver_may_die_in_any_phase(address: str) -> None:
    """One after another: each finds exactly one committed version everywhere, and goes on with the next."""
    with process("lasting", "first", address) as first:
        before = first.reports()
        first.kill()
    committed = before["version"]
    for phase in (*PHASES, *PHASES):
        with process("lasting", phase, address) as driver:
            found = driver.reports()
            assert found["version"] in (committed, committed + 1), phase
            assert found["engines"] == dict.fromkeys(("e0", "e1"), found["version"]), phase
            assert found["exact"] == {"e0": True, "e1": True}, phase
            assert found["serving"] == ["e0", "e1"], phase
            assert found["pids"] == before["pids"], phase
            driver.ended()
            committed = found["version"]
    with process("lasting", "last", address) as last:
        found = last.reports()
        assert found["exact"] == {"e0": True, "e1": True}
        last.reports()
    _gone(*before["pids"].values())


def _gone(*pids: int) -> None:
    deadline = time.monotonic() + patient(10)
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


WIDTH = 64
NAMESPACE = "claims"
TAKEN = "is connected to another WeightSync, "


@pytest.fixture(scope="module")
def actors(cluster: None) -> Iterator[dict[str, Any]]:
    classes = {"trainer": (Trainer, (WIDTH, "c0")), "e0": (Engine, (WIDTH, "e0", "c0"))}
    classes["e1"] = Engine, (WIDTH, "e1", "c1")
    made = {
        name: ray.remote(cls).options(num_cpus=0, name=name, namespace=NAMESPACE).remote(*args)
        for name, (cls, args) in classes.items()
    }
    yield made
    for actor in made.values():
        ray.kill(actor)


def make(actors: dict[str, Any], *engines: str, name: str | None = None) -> WeightSync:
    sync = WeightSync(SyncConfig(bucket_bytes=64 << 10), name=name)
    sync.register_trainers([actors["trainer"]])
    sync.register_engines({each: actors[each] for each in engines})
    return sync


def test_a_second_one_is_refused_until_the_first_is_closed(actors: dict[str, Any]) -> None:
    with make(actors, "e0", name="first") as first, make(actors, "e1", "e0") as second:
        first.connect()
        first.update_weights(1)
        begun = time.monotonic()
        with pytest.raises(StateError, match=f"{TAKEN}'first' of process {os.getpid()} on .*close"):
            second.connect()
        assert time.monotonic() - begun < patient(10)
        with make(actors, "e1") as third, pytest.raises(StateError, match=f"trainer 0 {TAKEN}'first'"):
            third.connect()
        first.connect()  # again, also when it has lost a holder
        ray.kill(first.holders()["holder 0"])
        first.connect()
        assert first.update_weights(2).engines == {"e0": 2}
        assert first.add_engine("e1", actors["e1"]) is not None, "the refused ones have let it go"
        first.remove_engine("e0")
        with make(actors, "e0") as fourth, pytest.raises(StateError, match=f"trainer 0 {TAKEN}'first'"):
            fourth.connect()
        first.close()
        second.connect()
        assert second.update_weights(3).engines == {"e0": 3, "e1": 3}


def test_an_engine_that_nobody_has_any_more_ends(actors: dict[str, Any]) -> None:
    engine = ray.remote(Engine).options(num_cpus=0).remote(WIDTH, "e2", "c3")
    pid = ray.get(engine.__ray_call__.remote(lambda _: os.getpid()))
    with make({**actors, "e2": engine}, "e2") as sync:
        sync.connect()
        assert sync.update_weights(1).engines == {"e2": 1}
    del sync, engine
    gc.collect()
    assert until(lambda: not psutil.pid_exists(pid), patient(30))


@pytest.mark.faults  # the test above asks the same question
def test_an_engine_of_another_cannot_be_added(actors: dict[str, Any]) -> None:
    with make(actors, "e0") as first, WeightSync(SyncConfig(bucket_bytes=64 << 10)) as second:
        first.connect()
        second.register_trainers([standby := ray.remote(Trainer).options(num_cpus=0).remote(WIDTH, "c2")])
        second.register_engines({"e1": actors["e1"]})
        second.connect()
        with pytest.raises(StateError, match=f"engine e0 {TAKEN}of process"):
            second.add_engine("e0", actors["e0"])
        for each, engine in ((second, "e1"), (first, "e0")):
            report = each.update_weights()
            assert report.engines == {engine: report.version}
        ray.kill(standby)


@pytest.mark.faults  # it starts drivers of their own
def test_one_whose_driver_lives_keeps_its_actors_and_one_whose_driver_died_loses_them(
    actors: dict[str, Any],
) -> None:
    address = ray.get_runtime_context().gcs_address
    forget([actors["e0"]])
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fleets.claimer", address, NAMESPACE],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "connected\n"
            named = re.escape(f"of process {driver.pid} on ")
            for number in (0, signal.SIGSTOP):
                driver.send_signal(number)
                begun = time.monotonic()
                with make(actors, "e0") as sync, pytest.raises(StateError, match=TAKEN + named):
                    sync.connect()
                assert time.monotonic() - begun < patient(15)
        finally:
            driver.kill()
    with make(actors, "e0") as sync:
        sync.connect()
        assert sync.update_weights(2).engines == {"e0": 2}


def test_numbers_of_versions_that_engines_served_before_they_slept_are_not_given_again(cluster: None) -> None:
    trainer, engine = spawn(Trainer, WIDTH, "slept-t"), spawn(Engine, WIDTH, "e0", "slept-e0")
    for how in ({}, {"name": "slept"}):  # the second has nothing to take over: there are no copies
        with WeightSync(SyncConfig(keep_versions=1), **how) as sync:
            sync.register_trainers([trainer])
            sync.register_engines({"e0": engine})
            sync.connect()
            first = sync.update_weights().version
            assert sync.update_weights().version == first + 1
            sync.sleep()
    assert first == 3
    with WeightSync(SyncConfig()) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        with pytest.raises(ConfigError, match="engine e0 served version 4 of an earlier WeightSync"):
            sync.update_weights(4)
    for actor in (trainer, engine):
        ray.kill(actor)
