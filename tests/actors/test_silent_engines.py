"""Engines that fall silent, are slow, pause late, or whose `respawn` does not return."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from tests.fleets.actors import Engine, Slowing, Trainer, spawn, until
from tests.fleets.faulty import pid
from tests.fleets.turns import GREEDY, PROMPTS, Teacher
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.driver.engine_state import EngineState
from weightsync.report import SyncReport

WIDTH = 64
CONFIG = SyncConfig(
    bucket_bytes=4096, timeout_s=patient(2), connect_timeout_s=patient(60), heartbeat_s=patient(0.25)
)


class Fleet:
    """A trainer and two engines, of which e1 falls silent."""

    def __init__(self, respawn: Callable[[str], Any] | None = None, **settings: Any) -> None:
        self.trainer = spawn(Trainer, WIDTH, "silent-t")
        self.engines = {name: spawn(Engine, WIDTH, name, f"silent-{name}") for name in ("e0", "e1")}
        self.sync = WeightSync(SyncConfig(**{**vars_of(CONFIG), **settings}))
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines(self.engines, respawn=respawn)
        self.sync.connect()
        self.update(1)
        self.sync.settle(patient(20))

    def update(self, version: int) -> SyncReport:
        ray.get(self.trainer.train.remote(version))
        return self.sync.update_weights(version)

    def holder(self) -> Any:
        return self.sync.holders()[f"holder {dict(self.sync.plan.members.engines)['e1'][0]}"]

    def is_dead(self) -> bool:
        return self.sync.engine_states()["e1"] is EngineState.DEAD

    def serves(self, version: int) -> bool:
        """Whether e1 serves a version, with the bytes that it has."""
        if self.sync.engine_versions()["e1"] != version:
            return False
        served, held = ray.get(
            [self.engines["e1"].sync_serving.remote(), self.engines["e1"].weights.remote()]
        )
        wanted = ray.get(self.trainer.weights.remote())
        return served == version and all(torch.equal(wanted[name], held[name]) for name in wanted)

    def close(self) -> None:
        self.sync.close()
        for actor in (self.trainer, *self.engines.values()):
            ray.kill(actor)


def vars_of(config: SyncConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.fixture
def fleets(cluster: None) -> Iterator[list[Fleet]]:
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.close()


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for each in pids:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in pids:
            with contextlib.suppress(ProcessLookupError):  # it was respawned
                os.kill(each, signal.SIGCONT)


def test_an_engine_that_is_heard_again_is_filled_and_serves(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet())
    with stopped(pid(fleet.engines["e1"])):
        assert until(fleet.is_dead, patient(5))
        assert fleet.update(2).engines["e0"] == 2
    assert until(lambda: fleet.serves(2), patient(20))
    assert fleet.update(3).engines == {"e0": 3, "e1": 3}


@pytest.mark.faults
def test_one_whose_holder_is_silent_too_costs_no_update_and_gets_a_new_holder(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet())
    with stopped(pid(fleet.engines["e1"]), pid(fleet.holder())):
        assert until(fleet.is_dead, patient(5))
        assert fleet.update(2).engines["e0"] == 2
    assert until(lambda: fleet.serves(2), patient(30))
    assert fleet.update(3).engines == {"e0": 3, "e1": 3}


@pytest.mark.faults
def test_one_that_no_snapshot_can_fill_takes_the_next_update(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet(keep_versions=1))
    with stopped(pid(fleet.engines["e1"])):
        assert until(fleet.is_dead, patient(5))
    assert until(lambda: not fleet.is_dead(), patient(20))
    assert fleet.sync.engine_versions()["e1"] == 0
    assert fleet.update(2).engines == {"e0": 2, "e1": 2}


@pytest.mark.faults
def test_one_whose_host_is_cut_off_keeps_its_process_and_one_that_hangs_is_respawned(
    fleets: list[Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    started: list[str] = []

    def respawn(name: str) -> Any:
        started.append(name)
        fleet.engines[name] = spawn(Engine, WIDTH, name, f"silent-again-{name}")
        return fleet.engines[name]

    fleets.append(fleet := Fleet(respawn=respawn))
    engine = pid(fleet.engines["e1"])
    with stopped(engine, pid(fleet.holder())):
        assert until(fleet.is_dead, patient(5))
        assert fleet.update(2).engines["e0"] == 2
        assert until(lambda: "its host is lost: waiting for it" in caplog.text, patient(10))
    assert until(lambda: fleet.serves(2), patient(30))
    fleet.sync.settle(patient(20))
    assert fleet.update(3).engines == {"e0": 3, "e1": 3}
    assert (started, pid(fleet.engines["e1"])) == ([], engine)
    assert fleet.sync.heals[-1].respawned_at is None

    with stopped(engine):  # its holder answers, so it hangs
        assert until(lambda: started == ["e1"], patient(20))
    assert until(lambda: fleet.serves(3), patient(30))


# No heartbeat comes in between: the engine is not found dead.
LATE_CONFIG = SyncConfig(
    bucket_bytes=64 << 10, timeout_s=patient(0.5), connect_timeout_s=patient(200), heartbeat_s=patient(200)
)
KINDS = ["torch", "vllm"]


@pytest.fixture
def actors() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for actor in started:
        ray.kill(actor)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_pauses_late_goes_on_by_itself(tmp_path: Path, actors: list[Any], kind: str) -> None:
    if kind == "vllm":
        pytest.importorskip("vllm")
    build_tiny_qwen3(tmp_path, False, 1)
    trainer = spawn(Teacher, str(tmp_path), "late")
    engines = {
        "e0": spawn(EngineActor, "torch", str(tmp_path), "e0", {}, "late-0"),
        "e1": spawn(EngineActor, kind, str(tmp_path), "e1", {}, "late-1"),
    }
    actors += [trainer, *engines.values()]
    with WeightSync(LATE_CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        stopped = pid(engines["e1"])
        wanted = ray.get(trainer.train.remote(1))
        assert sync.update_weights(1).engines == {"e0": 1, "e1": 1}
        ray.get(trainer.train.remote(2))
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert sync.update_weights(2).engines == {"e0": 2, "e1": 1}
            assert set(sync.serving()) == {"e0"}
            assert sync.engine_states()["e1"] is EngineState.PAUSING
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert until(lambda: set(sync.serving(any_version=True)) == {"e0", "e1"}, patient(30))
        assert set(sync.serving()) == {"e0"}, "e1 serves an earlier version"
        rollout = ray.get(engines["e1"].generate.remote(PROMPTS, GREEDY), timeout=patient(30))
        assert (rollout.tokens, rollout.version) == (wanted, 1)
        assert sync.update_weights(3).engines == {"e0": 3, "e1": 3}


TIMEOUT_S = patient(1.5)
SLOW_CONFIG = SyncConfig(
    bucket_bytes=4096,
    timeout_s=TIMEOUT_S,
    connect_timeout_s=patient(60),
    heartbeat_s=patient(60),
    heal_backoff_s=0.05,
)


@pytest.mark.timeout(120)
@pytest.mark.faults  # test_slow_engines holds it over real holders and sockets, without Ray
@pytest.mark.parametrize("num_updates", [5, 20])
@pytest.mark.parametrize(
    ("seconds", "respawns"),
    [
        pytest.param(10_000.0, True, id="stuck"),
        pytest.param(1.5 * TIMEOUT_S, True, id="slow"),
        pytest.param(10_000.0, False, id="not respawned"),
    ],
)
def test_one_slow_engine_costs_the_others_no_version(
    num_updates: int, seconds: float, respawns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engines = {name: spawn(Slowing, WIDTH, name, f"slow-{name}") for name in ("e0", "e1", "e2")}
    trainer = spawn(Trainer, WIDTH, "slow-trainer")

    def respawn(name: str) -> Any:
        engines[name] = spawn(Engine, WIDTH, name, f"slow-{name}")
        return engines[name]

    with WeightSync(SLOW_CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines, respawn=respawn if respawns else None)
        sync.connect()
        begun = time.monotonic()
        sync.update_weights(1)
        undisturbed = time.monotonic() - begun
        ray.get(engines["e1"].slow_down.remote(seconds))
        took = []
        for version in range(2, 2 + num_updates):
            begun = time.monotonic()
            report = sync.update_weights(version)
            took.append(time.monotonic() - begun)
            assert report.engines["e0"] == report.engines["e2"] == version, report
            assert set(report.failures) <= {"e1"}, report
        assert all(each < undisturbed + TIMEOUT_S for each in took), took
        assert all(each < TIMEOUT_S / 2 for each in took[2:]), took
        sync.settle(patient(60))
        healed = EngineState.SERVING if respawns else EngineState.DEAD
        assert sync.engine_states()["e1"] is healed
        logging.getLogger("weightsync").warning("updates took %s", took)
    for actor in (*engines.values(), trainer):
        ray.kill(actor)


@pytest.mark.faults  # it starts a driver of its own
def test_a_respawn_that_never_returns_leaves_its_engine_dead_and_lets_the_process_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fleets.stuck", ray.get_runtime_context().gcs_address],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        try:
            # Ray may speak of the killed worker before. The line says that close() has returned.
            found = json.loads(next(line for line in driver.stdout if line.startswith("{")))
            assert driver.wait(patient(30)) == 0
            log = driver.stderr.read()
        finally:
            driver.kill()
    assert found["states"] == {"e0": "SERVING", "e1": "DEAD", "e2": "SERVING"}
    assert found["engines"] == {"e0": 2, "e1": 0, "e2": 2}
    assert found["heals"] == ["e2"], "another engine is healed while the first start hangs"
    assert sorted(found["calls"]) == ["e0", "e1", "e2"], "it is not called again for the same engine"
    assert "[engine e1] is given up after 1 attempt: respawn: no answer within " in log


def test_an_actor_that_respawn_returns_too_late_is_killed() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    late: list[Any] = []

    def respawn(name: str) -> Any:
        begun.set()
        assert go_on.wait(patient(60))
        late.append(spawn(Engine, WIDTH, name, "late-1"))
        ended.set()
        return late[0]

    engines = {name: spawn(Engine, WIDTH, name, f"late-{name}") for name in ("e0", "e1")}
    with WeightSync(SyncConfig(bucket_bytes=64 << 10, respawn_timeout_s=0.5)) as sync:
        sync.register_trainers([trainer := spawn(Trainer, WIDTH, "late-e0")])
        sync.register_engines(engines, respawn=respawn)
        sync.connect()
        sync.update_weights(1)
        ray.kill(engines["e1"])
        assert begun.wait(patient(60))
        sync.settle(patient(60))
        assert sync.engine_states()["e1"] is EngineState.DEAD
        go_on.set()
        assert ended.wait(patient(60))
        assert until(lambda: _is_dead(late[0]), patient(60))
        assert sync.engine_states()["e1"] is EngineState.DEAD
        replacement = spawn(Engine, WIDTH, "e1", "late-e1")
        report = sync.add_engine("e1", replacement)
        assert report is not None
        assert sync.engine_versions() == {"e0": 1, "e1": 1}
    for actor in (trainer, engines["e0"], replacement):
        ray.kill(actor)


def _is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.sync_ping.remote(), timeout=patient(10))
    except RayActorError:
        return True
    return False
