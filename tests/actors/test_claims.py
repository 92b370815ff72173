"""One WeightSync at a time has an actor."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.fleets.actors import Engine, Trainer, forget, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import StateError

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
        assert second.update_weights(1).engines == {"e1": 1}
        assert first.update_weights(1).engines == {"e0": 1}
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
