"""What a user may get wrong at the public door: each is said at once, and a correct call works after it."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray

from tests.fleets.actors import Engine, Trainer, forget, spawn, until
from tests.fleets.far_engine import Far
from tests.fleets.intercept import held
from tests.fleets.own_driver import DrivingEngine, DrivingTrainer
from tests.patience import patient
from tests.terminal import Terminal
from weightsync import ConfigError, SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.actors.ray.actor_class import actor_class
from weightsync.errors import PlanError, StateError
from weightsync.faults import Fault, FaultPlan
from weightsync.protocol.log_level import used_log_level

WIDTH = 16


class Plain:
    """An actor that is neither a trainer nor an engine."""

    async def generate(self) -> None:
        """As an engine of somebody else's."""


class Actors(NamedTuple):
    trainer: Any
    e0: Any
    e1: Any
    plain: Any


@pytest.fixture(scope="module")
def actors(cluster: None) -> Actors:
    e0, e1 = (spawn(Engine, WIDTH, f"e{i}", f"w{i}") for i in range(2))
    return Actors(spawn(Trainer, WIDTH, "w0"), e0, e1, spawn(Plain))


@pytest.fixture
def sync(actors: Actors) -> Iterator[WeightSync]:
    forget([actors.e0, actors.e1])
    with WeightSync(SyncConfig(bucket_bytes=8192, timeout_s=patient(60))) as made:
        made.register_trainers([actors.trainer])
        made.register_engines({"e0": actors.e0})
        yield made


def test_versions_are_whole_numbers_and_the_next_one_where_none_is_given(sync: WeightSync) -> None:
    sync.connect()
    assert sync.update_weights().version == 1
    taken = sync.update_weights(np.int64(4)).version  # type: ignore[arg-type]
    assert (taken, type(taken)) == (4, int)
    assert sync.update_weights_async().result(patient(60)).version == 5
    for bad in (True, np.bool_(1), "6", 6.0):
        refused = sync.update_weights_async(bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"version: {re.escape(repr(bad))} .* such as 6, or nothing"):
            refused.result(0)
    assert sync.update_weights().version == 6


def level_of(actor: Any) -> str:
    level: str = ray.get(actor.__ray_call__.remote(lambda _: used_log_level()), timeout=patient(60))
    return level


def test_the_drivers_log_level_reaches_all_actors(actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("weightsync")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setenv("WEIGHTSYNC_LOG_LEVEL", "verbose")
    with pytest.raises(ConfigError, match=r"WEIGHTSYNC_LOG_LEVEL: 'verbose' .* valid: CRITICAL, DEBUG"):
        WeightSync()
    monkeypatch.setenv("WEIGHTSYNC_LOG_LEVEL", "error")
    with WeightSync(SyncConfig(bucket_bytes=8192, timeout_s=patient(60))) as made:
        made.register_trainers([actors.trainer])
        made.register_engines({"e0": actors.e0})
        made.connect()
        reached = [actors.trainer, actors.e0, *made.holders().values()]
        assert until(lambda: all(level_of(actor) == "ERROR" for actor in reached), patient(30))
    assert logger.level == logging.ERROR
    logger.setLevel(logging.NOTSET)


def test_a_loop_connects_and_awaits_updates_and_is_free_with_threads(sync: WeightSync) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async def work() -> None:
        sync.connect()
        assert (await sync.update_weights_async()).version == 1
        with pytest.raises(ConfigError, match="version: 'x'"):
            await sync.update_weights_async("x")  # type: ignore[arg-type]
        ticking = asyncio.create_task(tick())
        with held("pause"):
            update = await asyncio.to_thread(sync.update_weights_async, 2)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(update, 0.01)
            while ticks <= 5:
                await asyncio.sleep(0.01)
        assert (await update).version == sync.version == 2
        ticking.cancel()
        await asyncio.to_thread(sync.connect)
        assert sync.update_weights().version == 3

    asyncio.run(work())


def test_a_long_connect_shows_a_bar_on_a_terminal_alone(
    sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync.connect()
    sync.inject(FaultPlan((Fault(process="engine e0", action="slow", at="connect", seconds=2.0),)))
    for shown in (Terminal(), io.StringIO()):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", shown)
            sync.connect()
        is_terminal = shown.isatty()
        assert ("connect ━" in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", shown.getvalue())) is is_terminal
        assert bool(shown.getvalue()) is is_terminal
        assert sync.update_weights().verified


def test_a_second_update_says_in_its_future_that_one_runs(sync: WeightSync) -> None:
    sync.connect()
    with held("pause"):
        first = sync.update_weights_async()
        second = sync.update_weights_async()
        assert not first.done()
        with pytest.raises(StateError, match="an update is running"):
            second.result(0)
    assert first.result(patient(60)).version == 1
    assert sync.update_weights().version == 2


def test_what_is_no_trainers_handle_is_refused(sync: WeightSync, actors: Actors) -> None:
    derived = "give the handle of an actor derived from TrainerShard"
    for given, says in (
        (Trainer, "give a list of at least one actor handle"),
        (actors.trainer, "give a list of at least one actor handle"),
        ([Trainer], r"trainers\[0\]: <class .*Trainer'> is not valid; it is a class: start an actor of it"),
        ([ray.remote(Trainer)], r"trainers\[0\]: .* is not valid; it is a class: start an actor of it"),
        ([actors.trainer, None], rf"trainers\[1\]: None is not valid; {derived}"),
        (
            [actors.plain],
            rf"trainers\[0\]: Actor\(Plain, .*\) is not valid; {derived}; this one is of neither kind",
        ),
        (
            [actors.e0],
            rf"Actor\(Engine, .*\) is not valid; {derived}; this one is of EngineActor or VllmActor",
        ),
        ([actors.trainer] * 2, r"trainers\[1\]: Actor\(Trainer, .*; trainers\[0\] is the same actor"),
    ):
        with pytest.raises(ConfigError, match=says):
            sync.register_trainers(given)
    sync.connect()
    assert sync.update_weights().verified


def test_what_is_no_engines_handle_is_refused(sync: WeightSync, actors: Actors) -> None:
    derived = "give the handle of an actor derived from EngineActor or VllmActor"
    mistakes: list[tuple[Any, str]] = [
        (Engine, r"engines\['x'\]: <class .*Engine'> is not valid; it is a class: start an actor of it"),
        (ray.remote(EngineActor), r"engines\['x'\]: .* is not valid; it is a class: start an actor of it"),
        (None, rf"engines\['x'\]: None is not valid; {derived}"),
        (
            actors.plain,
            rf"engines\['x'\]: Actor\(Plain, .*\) is not valid; {derived}; this one is of neither kind",
        ),
        (actors.trainer, rf"Actor\(Trainer, .*\) is not valid; {derived}; this one is of TrainerShard"),
        (actors.e0, r"engines\['x'\]: Actor\(Engine, .*; engines\['e0'\] is the same actor"),
    ]
    for given, says in mistakes:
        with pytest.raises(ConfigError, match=says):
            sync.register_engines({"e0": actors.e0, "x": given})
    with pytest.raises(ConfigError, match="engines: 1 is not valid; give a text as the name"):
        sync.register_engines({1: actors.e0})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="respawn: 'e0' is not valid; give a function"):
        sync.register_engines({"e0": actors.e0}, respawn="e0")  # type: ignore[arg-type]
    sync.connect()
    sync.update_weights()
    for given, says in mistakes:
        with pytest.raises(ConfigError, match=says):
            sync.add_engine("x", given)
    assert sync.add_engine("x", actors.e1) is not None
    assert sync.update_weights().engines == {"e0": 2, "x": 2}


def test_more_engines_asked_for_than_there_are_is_said_by_connect(actors: Actors) -> None:
    with WeightSync(SyncConfig(bucket_bytes=8192, timeout_s=patient(60), min_engines=2)) as sync:
        sync.register_trainers([actors.trainer])
        sync.register_engines({"e0": actors.e0})
        with pytest.raises(
            ConfigError, match=r"min_engines: 2 is not valid; 1 engine registered: give at most 1"
        ):
            sync.connect()
        sync.register_engines({"e0": actors.e0, "e1": actors.e1})
        sync.connect()
        assert sync.update_weights().engines.keys() == {"e0", "e1"}


def test_prompts_are_token_ids_where_there_is_no_tokenizer(sync: WeightSync, actors: Actors) -> None:
    sync.connect()
    sync.update_weights()
    for given, says in (
        (
            "How are you?",
            r"prompts: 'How are you\?' is not valid; give a text, or a list of token ids",
        ),
        (
            ["How"],
            r"prompts\[0\]: 'How' is not valid; this engine has no tokenizer: give token ids",
        ),
        ([[1], ["How"]], r"prompts\[1\]\[0\]: 'How' is not valid; give a text, or a list of token ids"),
        ([1, 2], r"prompts\[0\]: 1 is not valid; give a text, or a list of token ids"),
        ({"input_ids": [[1]]}, r"prompts: 'dict' is not valid; give a text, or a list of token ids"),
        ([{"input_ids": [1]}], r"prompts\[0\]: 'dict' is not valid; give a text, or a list of token ids"),
    ):
        with pytest.raises(ConfigError, match=says):
            ray.get(actors.e0.generate.remote(given, {}))
    for right in ([[1, 2]], [(1, 2)], [np.array([1, 2])], []):
        assert ray.get(actors.e0.generate.remote(right, {})).version == (1 if right else 0)


CONFIG = SyncConfig(bucket_bytes=4096, timeout_s=patient(10), connect_timeout_s=patient(30))
SAYS = r"^engine far on host 192\.0\.2\.9: it has weightsync 9\.0\.1, and .* has .*: install one version"


def start(cls: type, *args: object) -> Any:
    return ray.remote(cls).options(num_cpus=0, max_restarts=0).remote(8, *args)


def test_two_versions_are_named_before_holders_start() -> None:
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([start(Trainer, "t")])
        sync.register_engines({"far": start(Far, "far", "b")})
        with pytest.raises(PlanError, match=SAYS):
            sync.connect()
        assert not sync.holders()


def test_a_late_engine_of_another_version_is_refused_and_the_others_go_on() -> None:
    with WeightSync(CONFIG) as sync:
        trainer, near = start(Trainer, "t"), start(Engine, "near", "a")
        sync.register_trainers([trainer])
        sync.register_engines({"near": near})
        sync.connect()
        with pytest.raises(PlanError, match=SAYS):
            sync.add_engine("far", start(Far, "far", "b"))
        assert [*sync.engines()] == ["near"]
        ray.get(trainer.train.remote(1))
        assert sync.update_weights(1).engines == {"near": 1}


def test_a_trainer_that_would_wait_for_itself_is_refused_at_once() -> None:
    trainer, engine = spawn(DrivingTrainer, WIDTH, "t"), spawn(Engine, WIDTH, "e0", "e")
    said, seconds = ray.get(trainer.drive.remote(engine))
    assert said.startswith("trainers[0]: ")
    assert "it is the actor that makes this call" in said
    assert seconds < patient(5)


def test_an_engine_that_would_wait_for_itself_is_refused_and_in_another_thread_it_works() -> None:
    trainer, engine = spawn(Trainer, WIDTH, "t"), spawn(DrivingEngine, WIDTH, "e0", "e")
    said, _ = ray.get(engine.drive.remote(trainer))
    assert said.startswith("engines['e0']: ")
    assert ray.get(engine.drive_in_a_thread.remote(trainer))[0] == "{'e0': 1}"


def test_a_trainer_of_several_threads_can_be_the_driver() -> None:
    trainer = actor_class(DrivingTrainer).options(num_cpus=0, max_concurrency=8).remote(WIDTH, "t")
    engine = spawn(Engine, WIDTH, "e0", "e")
    assert ray.get(trainer.drive.remote(engine))[0] == "{'e0': 1}"
