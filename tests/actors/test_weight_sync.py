"""The public door, over real Ray actors, and what Prometheus would find."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import ray
import torch

from tests.fleets.actors import Engine, Modelless, Trainer, forget, spawn, until
from tests.fleets.intercept import Call, held, intercept
from tests.fleets.local_cluster import ROOT
from tests.interrupts import interrupt_waiting_call
from tests.patience import patient
from weightsync import ConfigError, PlanError, SyncConfig, WeightSync
from weightsync.actors.membership import Membership
from weightsync.actors.ray.metrics import Metrics
from weightsync.driver.engine_state import EngineState
from weightsync.driver.updating.controller import Controller
from weightsync.errors import (
    EngineError,
    NonfiniteError,
    PeerError,
    PeerLostError,
    StateError,
    WeightSyncError,
)
from weightsync.faults import Fault, FaultPlan
from weightsync.node.link import Link, Links
from weightsync.report import SyncReport

WIDTH = 64
Make = Callable[..., WeightSync]


class Pool:
    """Actors for all tests of this file: starting one takes longer than most tests."""

    def __init__(self) -> None:
        self.actors: dict[tuple[type, str], Any] = {}

    def get(self, cls: type, name: str, slot: str) -> Any:
        key = (cls, slot)
        if key not in self.actors:
            self.actors[key] = spawn(cls, WIDTH, *((name, slot) if cls is Engine else (slot,)))
        return self.actors[key]

    def kill(self, actor: Any) -> None:
        os.kill(pid(actor), signal.SIGKILL)
        self.actors = {key: other for key, other in self.actors.items() if other is not actor}


@pytest.fixture(scope="module")
def pool(cluster: None) -> Pool:
    return Pool()


@pytest.fixture
def make(pool: Pool) -> Iterator[Make]:
    """`make(trainers=1, engines=2, colocated=False, **settings)`: registered, not connected."""
    made: list[WeightSync] = []
    forget(actor for (cls, _), actor in pool.actors.items() if cls is Engine)

    def run(trainers: int = 1, engines: int = 2, colocated: bool = False, **settings: object) -> WeightSync:
        place = "s" if colocated else "x"
        shards = [pool.get(Trainer, "", f"s{i}") for i in range(trainers)]
        if trainers > 1:  # replicas: a test before may have trained one of them
            ray.get([shard.train.remote(0) for shard in shards])
        served = {f"e{i}": pool.get(Engine, f"e{i}", f"{place}{i}") for i in range(engines)}
        sync = WeightSync(SyncConfig(**({"bucket_bytes": 8192, "timeout_s": patient(10)} | settings)))
        sync.register_trainers(shards)
        sync.register_engines(served)
        made.append(sync)
        return sync

    yield run
    for sync in made:
        sync.close()
        sync.close()


def holds(sync: WeightSync, name: str) -> bool:
    wanted = ray.get(sync.trainers()[0].weights.remote())
    found = ray.get(sync.engines()[name].weights.remote())
    return all(torch.equal(wanted[tensor], found[tensor]) for tensor in wanted)


def pid(actor) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.parametrize("colocated", [True, pytest.param(False, marks=pytest.mark.faults)])
def test_trainers_teach_and_engines_serve_each_version(
    make: Make, monkeypatch: pytest.MonkeyPatch, colocated: bool
) -> None:
    sync = make(trainers=2, engines=2, colocated=colocated)
    measured: list[int] = []
    monkeypatch.setattr(Metrics, "update", lambda _, report, plan: measured.append(report.version))
    sync.connect()
    assert len(sync.holders()) == (2 if colocated else 4)
    assert "broadcast" in str(sync.plan.explain())
    for version in (1, 2, 3):
        ray.get([trainer.train.remote(version) for trainer in sync.trainers()])
        report = sync.update_weights(version)
        assert report.engines == {"e0": version, "e1": version}
        assert report.verified
        assert list(report.spans) == [
            "driver",
            *(f"trainer {i}" for i in (0, 1)),
            *(f"holder {i}" for i in range(len(sync.holders()))),
            *(f"engine e{i} rank 0" for i in (0, 1)),
        ]
        assert [span.name for span in report.spans["engine e1 rank 0"]] == ["load", "verify"]
        assert holds(sync, "e0")
        assert holds(sync, "e1")
        rollout = ray.get(sync.engines()["e1"].generate.remote([[1, 2]], {}))
        assert rollout.version == version
    assert sync.engine_versions() == {"e0": 3, "e1": 3}
    assert measured == [1, 2, 3]


def test_the_order_of_calls_is_held(make: Make) -> None:
    sync = make()
    with pytest.raises(StateError, match="connect"):
        sync.update_weights(1)
    with pytest.raises(StateError, match="connect"):
        _ = sync.plan
    assert sync.holders() == {}
    sync.connect()
    assert [*sync.holders()] == ["holder 0", "holder 1", "holder 2"]
    with pytest.raises(StateError, match="keeps the committed version"):
        sync.heal("e0")
    with held("pause"):
        first = sync.update_weights_async(1)
        with pytest.raises(StateError, match="an update is running"):
            sync.update_weights(2)
    assert first.result(patient(10)).version == 1
    with pytest.raises(ConfigError, match="more than 1"):
        sync.update_weights(1)
    with pytest.raises(ConfigError, match="whole number"):
        sync.update_weights("2")  # type: ignore[arg-type]
    sync.close()
    with pytest.raises(StateError, match="closed"):
        sync.update_weights(2)


def test_a_new_one_numbers_its_versions_above_those_that_engines_serve(make: Make) -> None:
    first = make()
    first.connect()
    assert first.update_weights(5).version == 5
    first.close()
    second = make()
    second.connect()
    assert second.version == 0
    for version in (1, 5):
        with pytest.raises(ConfigError, match=r"engine e0 served version 5 .*more than 5"):
            second.update_weights(version)
    assert ray.get(second.engines()["e0"].generate.remote([[1]], {})).version == 5
    assert second.update_weights().engines == {"e0": 6, "e1": 6}
    with pytest.raises(ConfigError, match="versions grow: give more than 6"):
        second.update_weights(6)


def test_an_error_of_a_layout_names_the_engine(make: Make, pool: Pool) -> None:
    sync = make()
    error = EngineError("", "layout", "ValueError: no place for w", 0)  # as of a rank before it is attached
    ray.get(sync.engines()["e1"].fail.remote(error))
    with pytest.raises(
        EngineError, match=r"^engine e1, rank 0, failed in layout: ValueError: no place for w"
    ):
        sync.connect()
    pool.kill(sync.engines()["e1"])


def test_after_ctrl_c_the_next_update_waits_for_the_end_of_the_one_before(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = make()
    sync.connect()
    update = Controller.update

    async def interrupted(controller: Controller, *args: Any) -> SyncReport:
        await interrupt_waiting_call()
        await asyncio.sleep(0.3)  # the next call comes meanwhile
        return await update(controller, *args)

    for version in (2, 4):
        with monkeypatch.context() as patched:
            patched.setattr(Controller, "update", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sync.update_weights()
        assert sync.update_weights().engines == {"e0": version, "e1": version}
        assert {*sync.engine_states().values()} == {EngineState.SERVING}
        assert holds(sync, "e0")


@pytest.mark.faults
def test_weights_with_nan_are_refused_by_name_and_engines_serve_on(make: Make) -> None:
    sync = make(engines=1, nonfinite="refuse")
    sync.connect()
    (trainer,) = sync.trainers()
    ray.get(trainer.train.remote(1))
    assert sync.update_weights(1).nonfinite == {}
    ray.get(trainer.__ray_call__.remote(lambda self: self.model[1].bias.data.fill_(float("nan")).sum()))
    with pytest.raises(NonfiniteError, match=r"version 2: NaN or Inf in 1\.bias \(8\)"):
        sync.update_weights(2)
    assert [*sync.serving()] == ["e0"]
    rollout = ray.get(sync.engines()["e0"].generate.remote([[1, 2]], {}))
    assert rollout.version == 1
    ray.get(trainer.train.remote(2))
    assert sync.update_weights(2).engines == {"e0": 2}
    assert holds(sync, "e0")


@pytest.mark.faults
def test_closing_while_a_version_is_still_being_copied_warns_of_nothing(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = make()
    sync.connect()
    sync.inject(FaultPlan((Fault(process="holder 0", action="slow", at="commit", seconds=60.0),)))
    copies: list[asyncio.Task[object]] = []
    end_holders = Membership.close

    def noting(call: Call) -> Call:
        async def noted(*args: object) -> Any:
            task = asyncio.current_task()
            assert task is not None
            copies.append(task)
            return await call(*args)

        return noted

    async def end_slowly(members: Membership) -> None:
        await end_holders(members)
        assert copies
        # who copies still would notice that they ended
        assert not (await asyncio.wait(copies, timeout=patient(10)))[1]

    undo = intercept("snapshot", noting)
    monkeypatch.setattr(Membership, "close", end_slowly)
    assert sync.update_weights(1).verified
    assert until(lambda: bool(copies), patient(10))
    sync.close()
    undo()
    gc.collect()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_trainers_may_train_on_while_the_version_travels(make: Make) -> None:
    sync = make(engines=1)
    sync.connect()
    trainer = sync.trainers()[0]
    for version in range(1, 6):
        ray.get(trainer.train.remote(version))
        published = ray.get(trainer.weights.remote())
        future = sync.update_weights_async(version)
        trained = trainer.train.remote(100 + version)
        assert future.result(patient(10)).version == version
        ray.get(trained)
        found = ray.get(sync.engines()["e0"].weights.remote())
        assert all(torch.equal(published[name], found[name]) for name in published)
        assert not holds(sync, "e0")


def test_all_actors_get_one_stored_plan_which_is_freed_with_its_connection(make: Make) -> None:
    sync, asked = make(), list[tuple[str, object]]()

    def noting(call: Call) -> Call:
        async def asking(remote: Any, method: str, *args: object) -> object:
            asked.append((remote.name, args[0]))
            return await call(remote, method, *args)

        return asking

    undo = [intercept(method, noting) for method in ("attach", "adopt")]
    try:
        sync.connect()
        members = ["trainer 0", "engine e0", "engine e1"]
        assert sorted(name for name, _ in asked) == sorted(members)
        (stored,) = {id(plan): plan for _, plan in asked}.values()
        assert isinstance(stored, ray.ObjectRef)
        assert ray.get(stored).digest() == sync.plan.digest()
        asked.clear()
        sync.update_weights(1)
        engine = sync.engines()["e1"]
        sync.remove_engine("e1")
        sync.add_engine("e1", engine)
        assert {plan for _, plan in asked} == {stored}
        asked.clear()
        held = sys.getrefcount(stored)
        sync.connect()
        asked.clear()
        assert until(lambda: sys.getrefcount(stored) == 2, patient(10)), "only this test has it"
        assert held > 2
    finally:
        for each in undo[::-1]:
            each()


def test_nothing_registered_is_refused() -> None:
    with WeightSync() as sync:
        for trainers in ([], object()):
            with pytest.raises(ConfigError, match=r"trainers.*give a list of at least one actor handle"):
                sync.register_trainers(trainers)
        for engines in ({}, [object()]):
            with pytest.raises(ConfigError, match=r"engines.*give a dict of at least one name and actor"):
                sync.register_engines(engines)
        with pytest.raises(StateError, match="register_trainers"):
            sync.connect()


def test_two_engines_on_one_slot_are_refused(make: Make) -> None:
    sync = make(engines=1)
    sync.register_engines({"e0": sync.engines()["e0"], "twin": spawn(Engine, WIDTH, "twin", "x0")})
    with pytest.raises(ConfigError, match="twin: 'slot:x0' is not valid; engine e0 has it"):
        sync.connect()


def test_a_trainer_without_a_model_is_told_so(make: Make) -> None:
    sync = make(engines=1)
    sync.register_trainers([spawn(Modelless)])
    with pytest.raises(StateError, match=r"self\.model"):
        sync.connect()


def test_tensors_that_the_engine_does_not_have_are_named(make: Make) -> None:
    sync = make(engines=1)
    sync.register_engines({"e0": spawn(Engine, WIDTH + 1, "e0", "x0")})
    with pytest.raises(PlanError, match=r"0\.weight"):
        sync.connect()


def test_engines_join_leave_and_heal_without_the_trainer(make: Make) -> None:
    sync = make(engines=1)
    sync.connect()
    sync.update_weights(4)
    published = ray.get(sync.trainers()[0].weights.remote())
    ray.get(sync.trainers()[0].train.remote(99))
    report = sync.add_engine("late", spawn(Engine, WIDTH, "late", "x9"))
    assert report is not None
    assert report.engines == {"e0": 4, "late": 4}
    found = ray.get(sync.engines()["late"].weights.remote())
    assert all(torch.equal(published[name], found[name]) for name in published)
    with pytest.raises(ConfigError, match="choose a name"):
        sync.add_engine("late", sync.engines()["late"])
    with pytest.raises(ConfigError, match=r"engine more: 'slot:x9'.*engine late has it: give each a device"):
        sync.add_engine("more", spawn(Engine, WIDTH, "more", "x9"))
    num_holders = len(sync.holders())
    sync.remove_engine("e0")
    assert sync.update_weights(5).engines == {"late": 5}
    assert len(sync.holders()) == num_holders - 1
    with pytest.raises(ConfigError, match="last one"):
        sync.remove_engine("late")
    with pytest.raises(ConfigError, match="did you mean 'late'"):
        sync.heal("lat")


def test_another_actor_under_an_engines_name_has_no_version_of_that_engine(make: Make, pool: Pool) -> None:
    sync = make(engines=2)
    sync.connect()
    assert sync.update_weights(1).engines == {"e0": 1, "e1": 1}
    other = pool.get(Engine, "e0", "other")
    forget([other])
    sync.register_engines({**sync.engines(), "e0": other})
    assert [*sync.serving()] == ["e1"]
    sync.connect()
    assert not holds(sync, "e0")
    assert (sync.engine_versions(), [*sync.serving()]) == ({"e0": 0, "e1": 1}, ["e1"])
    assert next((each.engine, each.version, each.proof) for each in sync.coverage()) == ("e0", 0, "")
    assert sync.update_weights(2).engines == {"e0": 2, "e1": 2}
    assert holds(sync, "e0")


@pytest.mark.faults
def test_an_engine_may_join_beside_a_trainer_that_had_none(make: Make) -> None:
    sync = make(trainers=2, engines=1, colocated=True)
    sync.connect()
    sync.update_weights(1)
    assert sync.add_engine("late", spawn(Engine, WIDTH, "late", "s1")) is not None
    ray.get([trainer.train.remote(2) for trainer in sync.trainers()])
    report = sync.update_weights(2)
    assert report.failures == {}
    assert report.engines == {"e0": 2, "late": 2}
    assert holds(sync, "late")


@pytest.mark.faults
def test_a_killed_engine_is_dead_and_the_others_go_on(make: Make, pool: Pool) -> None:
    sync = make(engines=2)
    sync.connect()
    sync.update_weights(1)
    pool.kill(sync.engines()["e1"])
    report = sync.update_weights(2)
    assert report.engines == {"e0": 2, "e1": 0}
    assert report.states["e1"] == "DEAD"
    assert sync.update_weights(3).engines["e0"] == 3
    assert sync.engine_states()["e1"] is EngineState.DEAD
    replacement = sync.add_engine("e1", pool.get(Engine, "e1", "x1"))
    assert replacement is not None
    assert replacement.engines == {"e0": 3, "e1": 3}
    assert holds(sync, "e1")


@pytest.mark.faults
def test_engines_that_die_one_after_another_do_not_stop_the_last_one(make: Make, pool: Pool) -> None:
    sync = make(engines=2)
    sync.register_engines(sync.engines() | {"spare": pool.get(Engine, "spare", "x8")})
    sync.connect()
    sync.update_weights(1)
    pool.kill(sync.engines()["e1"])
    sync.update_weights(2)
    pool.kill(sync.engines()["e0"])  # noticed by nobody before the next update connects again
    report = sync.update_weights(3)
    assert report.engines == {"e0": 0, "e1": 0, "spare": 3}
    assert {sync.engine_states()[name] for name in ("e0", "e1")} == {EngineState.DEAD}
    with pytest.raises(StateError, match="bring another with add_engine"):
        sync.heal("e0")
    assert sync.add_engine("e0", pool.get(Engine, "e0", "x0")) is not None
    assert sync.engine_versions() == {"e0": 3, "e1": 0, "spare": 3}


@pytest.mark.faults
def test_an_engine_that_does_not_fit_has_not_joined(make: Make, pool: Pool) -> None:
    sync = make(engines=1)
    sync.connect()
    sync.update_weights(1)
    wrong = spawn(Engine, WIDTH + 1, "wrong", "x7")
    with pytest.raises(PlanError, match=r"0\.weight"):
        sync.add_engine("wrong", wrong)
    assert sync.update_weights(2).engines == {"e0": 2}
    pool.kill(sync.engines()["e0"])
    replaced = sync.add_engine("e0", pool.get(Engine, "e0", "x0"))  # its death was not noticed yet
    assert replaced is not None
    assert replaced.engines == {"e0": 2}


def test_trainers_that_were_lost_can_be_replaced(make: Make, pool: Pool) -> None:
    sync = make(engines=1)
    sync.connect()
    pool.kill(sync.trainers()[0])
    with pytest.raises(PeerLostError, match="trainer 0"):
        sync.update_weights(1)
    sync.register_trainers([pool.get(Trainer, "", "s0")])
    assert sync.update_weights(1).engines == {"e0": 1}
    assert holds(sync, "e0")


def test_handles_of_something_else_are_refused(make: Make) -> None:
    sync = make(engines=1)
    with pytest.raises(ConfigError, match="derived from TrainerShard"):
        sync.register_trainers([object()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"SyncConfig\.from_dict"):
        WeightSync({"timeout_s": 3})  # type: ignore[arg-type]


@pytest.mark.faults
def test_fewer_living_engines_than_min_engines_is_refused_before_anything_moves(
    make: Make, pool: Pool
) -> None:
    sync = make(engines=2, min_engines=2)
    sync.connect()
    sync.update_weights(1)
    pool.kill(sync.engines()["e1"])
    with pytest.raises(PeerLostError, match="engine e1"):
        sync.update_weights(2)
    with pytest.raises(StateError, match="1 engine is alive"):
        sync.update_weights(3)


@pytest.mark.faults
def test_a_killed_holder_fails_the_update_and_is_replaced_for_the_next(make: Make) -> None:
    sync = make(engines=2, timeout_s=patient(1))
    sync.connect()
    sync.update_weights(1)
    (place,) = dict(sync.plan.members.engines)["e1"]
    os.kill(pid(sync.holders()[f"holder {place}"]), signal.SIGKILL)
    with pytest.raises(WeightSyncError):
        sync.update_weights(2)
    report = sync.update_weights(3)
    assert report.engines == {"e0": 3, "e1": 3}
    assert holds(sync, "e1")


def by_nodes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that the methods called by nodes will be in."""
    called: set[str] = set()
    call = Link.call

    async def noted(link: Link, name: str, *args: object, **more: Any) -> Any:
        called.add(name)
        return await call(link, name, *args, **more)

    monkeypatch.setattr(Link, "call", noted)
    return called


UPDATE = {"pause", "load", "resume", "snapshot"}


@pytest.mark.parametrize(("stage", "moves"), [("host", {"refill", "stage"}), ("none", {"move"})])
def test_an_update_calls_holders_and_engines_by_their_nodes(
    make: Make, monkeypatch: pytest.MonkeyPatch, stage: Any, moves: set[str]
) -> None:
    sync = make(stage=stage)
    sync.connect()
    called = by_nodes(monkeypatch)
    sync.update_weights(1)
    assert called >= {"pause", "load", "resume", *moves}
    assert holds(sync, "e0")


def test_weights_that_were_trained_before_another_connect_arrive(make: Make) -> None:
    sync = make()
    for version in (1, 2, 3):
        sync.connect()
        ray.get(sync.trainers()[0].train.remote(version))
        sync.update_weights(version)
        assert holds(sync, "e0")


def test_an_actor_that_cannot_reach_the_driver_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Links.offer
    unreachable = {"endpoint": "tcp://127.0.0.1:1"}
    monkeypatch.setattr(
        Links, "offer", lambda links, link: msgspec.structs.replace(offer(links, link), **unreachable)
    )
    sync = make(connect_timeout_s=patient(30))
    with pytest.raises(PeerError, match=r"node does not start: .* answer at tcp://127\.0\.0\.1:1"):
        sync.connect()


def test_a_holder_that_is_noticed_to_be_gone_twice_is_replaced(make: Make) -> None:
    def make_late(call: Call) -> Call:
        async def late(remote: Any, method: str, *args: object) -> Any:
            if remote.name == "holder 0":
                ray.kill(remote.handle)
                with suppress(PeerLostError):
                    while True:  # it may still answer
                        await call(remote, method, *args)
            try:
                return await call(remote, method, *args)
            except PeerLostError:
                await asyncio.sleep(1)  # until the watch has noticed the end, too
                raise

        return late

    sync = make()
    sync.connect()
    undo = intercept("ready", make_late)
    try:
        sync.connect()
    finally:
        undo()
    sync.update_weights(1)
    assert holds(sync, "e0")


@pytest.mark.faults  # Ray exports what it was told after some ten seconds
def test_an_update_is_found_on_the_nodes_prometheus_endpoint() -> None:
    """On a cluster of its own: that of the other tests collects no metrics."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleets.exporting"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr
