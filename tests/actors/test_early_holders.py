"""Holders start with the registration, and nobody waits while they allocate memory for copies."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.fleets.waiting_engine import WaitingEngine
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ConfigError, DeadlineError, PeerLostError, StateError
from weightsync.testing import Fault, FaultPlan

WIDTH = 16
NAMESPACE = "early"


@pytest.fixture(scope="module")
def trainers(cluster: None) -> Iterator[list[ray.actor.ActorHandle]]:
    made = [spawn(Trainer, WIDTH, f"early{i}") for i in range(2)]
    yield made
    for each in made:
        ray.kill(each)


@pytest.fixture(scope="module")
def engines(cluster: None) -> Iterator[dict[str, ray.actor.ActorHandle]]:
    made = {name: spawn(Engine, WIDTH, name, f"early-{name}") for name in ("e0", "e1")}
    yield made
    for each in made.values():
        ray.kill(each)


def holders() -> set[int]:
    """The processes of this cluster's holders, also of those that are still to get their place."""
    found, us = set(), os.getpid()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it ended while we looked
            if entry.name.isdigit() and Path(entry.path, "comm").read_text().startswith("ray::Holder"):
                pid = int(entry.name)
                # other clusters' are not ours to stop
                if pid in found or us in {parent.pid for parent in psutil.Process(pid).parents()}:
                    found.add(pid)
    return found


def started(before: set[int], number: int) -> bool:
    """Whether `number` processes are there in time that were not `before`, and no more a moment later."""
    # To look at all processes takes longer than the usual pause.
    if not until(lambda: len(holders() - before) == number, patient(60), pause_s=0.1):
        return False
    time.sleep(0.2)
    return len(holders() - before) == number


def pids(sync: WeightSync) -> set[int]:
    calls = [each.__ray_call__.remote(lambda _: os.getpid()) for each in sync.holders().values()]
    return set(ray.get(calls))


def test_holders_start_when_trainers_and_engines_are_registered(
    trainers: list[ray.actor.ActorHandle], engines: dict[str, ray.actor.ActorHandle]
) -> None:
    before = holders()
    with WeightSync(SyncConfig(connect_timeout_s=patient(60))) as sync:
        sync.register_trainers(trainers)
        assert started(before, 2)
        sync.register_engines(engines)
        sync.register_engines(engines)
        sync.register_trainers(trainers)
        assert started(before, 4)
        early = holders() - before
        assert not sync.holders()
        sync.connect()
        assert pids(sync) == early, "they became the holders"
        assert [ray.get(h.ready.remote())[0] for h in sync.holders().values()] == [*sync.holders()]
        assert sync.update_weights(1).engines == {"e0": 1, "e1": 1}
    assert started(before, 0)


def test_what_is_withdrawn_ends_its_processes(
    trainers: list[ray.actor.ActorHandle], engines: dict[str, ray.actor.ActorHandle]
) -> None:
    before = holders()
    with WeightSync(SyncConfig(connect_timeout_s=patient(60))) as sync:
        sync.register_trainers(trainers)
        sync.register_engines(engines)
        assert started(before, 4)
        sync.register_trainers(trainers[:1])
        assert started(before, 3)
        sync.remove_engine("e0")
        assert started(before, 2)
        left = holders() - before
        sync.connect()
        assert pids(sync) == left
        sync.register_engines(engines)
        assert started(before, 3)
    assert started(before, 0)
    sync.register_engines(engines)  # connect() says that it is closed
    with pytest.raises(StateError, match="is closed"):
        sync.connect()
    assert started(before, 0)


def test_a_driver_that_never_connects_leaves_no_process(
    trainers: list[ray.actor.ActorHandle], tmp_path: Path
) -> None:
    before = holders()
    waiting = spawn(WaitingEngine, WIDTH, "e0", "early-e0", tmp_path / "start")
    with WeightSync(SyncConfig()) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": waiting})
        assert started(before, 2)
    assert started(before, 0)
    with WeightSync(SyncConfig()) as sync:
        sync.register_trainers(trainers)  # closed at once, while processes start
    assert started(before, 0)
    (tmp_path / "start").touch()
    ray.get(waiting.__ray_ready__.remote())
    assert started(before, 0)
    ray.kill(waiting)


@pytest.mark.faults  # it starts a second driver and kills it
def test_a_driver_that_is_killed_before_it_connects_leaves_no_process() -> None:
    named = {"num_cpus": 0, "namespace": NAMESPACE}
    actors = [
        ray.remote(cls).options(name=name, **named).remote(WIDTH, *args)
        for name, cls, args in (("trainer", Trainer, ["early0"]), ("e0", Engine, ["e0", "early1"]))
    ]
    before = holders()
    command = [sys.executable, "-m", "tests.fleets.claimer", ray.get_runtime_context().gcs_address]
    with subprocess.Popen(
        [*command, NAMESPACE, "registered"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "registered\n"
        assert started(before, 2)
        driver.kill()
    assert started(before, 0)
    for actor in actors:
        ray.kill(actor)


def test_registering_an_engine_that_fails_raises_nothing_and_connect_names_it(
    trainers: list[ray.actor.ActorHandle], engines: dict[str, ray.actor.ActorHandle]
) -> None:
    before = holders()
    ray.kill(dead := spawn(Engine, WIDTH, "e1", "early-e1"))
    with WeightSync(SyncConfig(connect_timeout_s=patient(30))) as sync:
        sync.register_engines({**engines, "e1": dead})
        sync.register_trainers(trainers)
        assert started(before, 3)
        with pytest.raises(PeerLostError, match="engine e1"):
            sync.connect()


@pytest.mark.faults  # it waits for a deadline
def test_a_process_that_hangs_is_named_with_its_deadline_and_one_that_ended_is_replaced(
    trainers: list[ray.actor.ActorHandle], engines: dict[str, ray.actor.ActorHandle]
) -> None:
    before, deadline_s = holders(), patient(2)
    with WeightSync(SyncConfig(timeout_s=patient(1), connect_timeout_s=deadline_s)) as sync:
        sync.register_trainers(trainers)
        assert started(before, 2)
        others = holders()
        sync.register_engines({"e0": engines["e0"]})
        assert started(others, 1)
        (its,) = holders() - others
        os.kill(its, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match="holder 2") as raised:
            sync.connect()
        assert (raised.value.missing, raised.value.timeout_s) == (("holder 2",), deadline_s)
        sync.connect()
        assert its not in holders(), "Ray alone would not end it"
    assert started(before, 0)
    with WeightSync(SyncConfig(connect_timeout_s=patient(30))) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engines["e0"]})
        assert started(before, 3)
        os.kill(min(holders() - before), signal.SIGKILL)
        assert started(before, 2)
        sync.connect()
        assert sync.update_weights(1).engines == {"e0": 1}


def test_an_engine_that_starts_slowly_finds_holders_of_its_slot_started(
    trainers: list[ray.actor.ActorHandle], tmp_path: Path
) -> None:
    may_start = tmp_path / "start"
    engine = spawn(WaitingEngine, WIDTH, "e0", "early1", may_start)
    with WeightSync(SyncConfig(connect_timeout_s=patient(60))) as sync:
        before = holders()
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        connecting = threading.Thread(target=sync.connect)
        connecting.start()
        assert until(lambda: len(holders() - before) == 2, patient(60))
        assert connecting.is_alive()
        early = holders() - before
        may_start.touch()
        connecting.join(patient(60))
        assert sync.plan.members.num_holders == 2
        assert holders() - before == early, "the engine shares a trainer's holder"
        assert sync.update_weights(1).engines == {"e0": 1}
    ray.kill(engine)


def test_a_transport_that_no_trainer_can_have_is_refused_as_before(
    trainers: list[ray.actor.ActorHandle], tmp_path: Path
) -> None:
    (tmp_path / "start").touch()
    engine = spawn(WaitingEngine, WIDTH, "e0", "early1", tmp_path / "start")
    with WeightSync(SyncConfig(transport="nccl", connect_timeout_s=patient(60))) as sync:
        before = holders()
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        with pytest.raises(ConfigError, match="has no GPU: give auto"):
            sync.connect()
    assert started(before, 0)
    ray.kill(engine)


CONFIG = SyncConfig(bucket_bytes=4096, timeout_s=patient(10), connect_timeout_s=patient(30))
WIDE = 64
THERE = "memory for copies is there after"


class Rig:
    """A trainer and two engines, connected."""

    def __init__(self) -> None:
        self.trainer = spawn(Trainer, WIDE, "t")
        self.sync = WeightSync(CONFIG)
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines({name: spawn(Engine, WIDE, name, name) for name in ("e0", "e1")})
        self.sync.connect()
        self.sync.settle(patient(10))

    def wait_for(self, file: Path) -> None:
        """Have the trainer's holder wait for a file before it allocates memory, from now on."""

        def wait(holder: Any) -> None:
            reserve = holder.reserve

            def late(*args: object) -> object:
                assert until(file.exists, patient(60))
                return reserve(*args)

            holder.reserve = late

        ray.get(self.sync.holders()["holder 0"].__ray_call__.remote(wait))

    def update(self, version: int) -> None:
        ray.get(self.trainer.train.remote(version))
        report = self.sync.update_weights(version)
        assert report.engines == {"e0": version, "e1": version}
        assert "reserve" not in report.connect_phases

    def is_filled_again(self) -> bool:
        """Have an engine take the committed version from the holders."""
        report = self.sync.heal("e1")
        held, wanted = ray.get([self.sync.engines()["e1"].weights.remote(), self.trainer.weights.remote()])
        same = all((held[name] == tensor).all() for name, tensor in wanted.items())
        return report.verified and same and [*report.bytes_from] == ["holder 0"]


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """The file for which the holder of `slow` waits."""
    return tmp_path / "go"


@pytest.fixture
def slow(caplog: pytest.LogCaptureFixture, go: Path) -> Iterator[Rig]:
    caplog.set_level(logging.INFO, "weightsync")
    rig = Rig()
    assert caplog.text.count(THERE) == 1
    gc.collect()  # asyncio logs a task that nobody asked for its error when it goes
    caplog.clear()
    rig.wait_for(go)
    yield rig
    rig.sync.close()


def test_connect_and_updates_do_not_wait_and_settle_does(
    slow: Rig, caplog: pytest.LogCaptureFixture, go: Path
) -> None:
    slow.sync.connect()
    for version in (1, 2, 3):
        slow.update(version)
    assert set(slow.sync.serving()) == {"e0", "e1"}
    assert THERE not in caplog.text
    with pytest.raises(DeadlineError, match=r"copying the committed version: no answer .* from holders"):
        slow.sync.settle(0.01)
    go.touch()
    slow.sync.settle(patient(20))
    assert caplog.text.count(THERE) == 1
    assert slow.is_filled_again()


def test_a_fleet_that_connects_again_meanwhile_keeps_versions(
    slow: Rig, caplog: pytest.LogCaptureFixture, go: Path
) -> None:
    slow.sync.connect()
    assert THERE not in caplog.text
    threading.Timer(0.2, go.touch).start()
    slow.sync.connect()
    slow.update(1)
    slow.sync.settle(patient(20))
    assert caplog.text.count(THERE) == 2
    assert "not every holder" not in caplog.text
    assert slow.is_filled_again()


def test_an_engine_that_joins_meanwhile_is_filled(
    slow: Rig, caplog: pytest.LogCaptureFixture, go: Path
) -> None:
    slow.sync.connect()
    slow.update(1)
    assert THERE not in caplog.text
    threading.Timer(0.2, go.touch).start()
    report = slow.sync.add_engine("e2", spawn(Engine, WIDE, "e2", "e2"))
    assert report is not None
    assert report.engines == {"e0": 1, "e1": 1, "e2": 1}


def test_who_leaves_meanwhile_leaves_nothing_behind(slow: Rig, caplog: pytest.LogCaptureFixture) -> None:
    holders = [*slow.sync.holders().values()]
    pids = ray.get([holder.__ray_call__.remote(lambda _: psutil.Process().pid) for holder in holders])
    slow.sync.connect()
    slow.update(1)
    slow.sync.close()
    assert until(lambda: not any(map(psutil.pid_exists, pids)), patient(10))
    gc.collect()  # as in the fixture
    assert [each.getMessage() for each in caplog.records if each.levelno > logging.INFO] == []
    assert THERE not in caplog.text


def test_a_holder_that_ends_meanwhile_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with rig.sync as sync:
        sync.inject(FaultPlan((Fault(process="holder 0", action="kill", at="reserve"),)))
        sync.connect()
        sync.settle(patient(20))
        assert "not every holder can keep versions" in caplog.text
        rig.update(1)
        sync.settle(patient(20))
        assert rig.is_filled_again()
