"""Actors whose classes know nothing of weightsync are adopted as trainers and engines."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayError
from transformers import Qwen3Config

from tests.fleets import zygote
from tests.fleets.actors import until
from tests.fleets.foreign_actors import (
    AsyncEngine,
    AsyncTrainer,
    DozingRollout,
    PlainEngine,
    PlainTrainer,
    ReplicatedRollout,
    TransformersTrainer,
    VllmRollout,
)
from tests.pages import run_block
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.ray import publish_relay
from weightsync.actors.ray.process import ask_pid
from weightsync.errors import ConfigError, EngineError, RestartedError, StateError, WeightSyncError

CONFIG = SyncConfig(timeout_s=patient(20), connect_timeout_s=patient(40), heartbeat_s=patient(1))


class Fleet:
    """Two trainers of one class hold equal models; two engines of one class."""

    def __init__(self, trainer: type, engine: type, model: str | Callable[[Any], Any]) -> None:
        self.spawn = lambda _: ray.remote(num_cpus=0)(engine).remote()
        self.trainers = [ray.remote(num_cpus=0)(trainer).remote() for _ in range(2)]
        self.engines = {name: self.spawn(name) for name in ("e0", "e1")}
        self.sync = WeightSync(CONFIG)
        self.sync.register_trainers(self.trainers, model=model)
        self.sync.register_engines(self.engines, respawn=self.spawn, llm="llm")

    def update(self, version: int) -> None:
        trained, _ = ray.get([each.train.remote(version) for each in self.trainers])
        report = self.sync.update_weights(version)
        assert report.verified
        assert report.failures == {}
        self.check(trained, version)

    def check(self, trained: dict[str, torch.Tensor], version: int) -> None:
        assert self.sync.engine_versions() == {"e0": version, "e1": version}
        for engine in self.sync.engines().values():
            weights = ray.get(engine.weights.remote())
            assert all(torch.equal(weights[name], each) for name, each in trained.items())


@pytest.fixture(params=["plain", "async"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    if request.param == "plain":
        made = Fleet(PlainTrainer, PlainEngine, "actor.model")
    else:
        made = Fleet(AsyncTrainer, AsyncEngine, lambda actor: actor.actor.model)
    with made.sync:
        yield made
    for each in [*made.trainers, *made.engines.values()]:
        ray.kill(each)


def test_each_version_arrives_and_a_killed_engine_is_filled(fleet: Fleet) -> None:
    fleet.sync.connect()
    for version in (1, 2, 3):
        fleet.update(version)
    trained, _ = ray.get([each.train.remote(3) for each in fleet.trainers])
    killed = fleet.engines["e1"]
    os.kill(ray.get(killed.pid.remote()), signal.SIGKILL)
    deadline = time.monotonic() + patient(30)
    while fleet.sync.engines()["e1"] is killed or fleet.sync.engine_versions()["e1"] != 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    fleet.check(trained, 3)
    fleet.update(4)


def save_config(path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 64}
    Qwen3Config(**sizes, **heads, architectures=["Qwen3ForCausalLM"]).save_pretrained(path)


with_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")


@pytest.mark.faults
@with_vllm
def test_a_frameworks_own_vllm_answers_as_the_trainer_also_after_a_kill(tmp_path: Path) -> None:
    save_config(tmp_path)
    trainer = ray.remote(num_cpus=0)(TransformersTrainer).remote(str(tmp_path))
    prompt = [1, 2, 3], 8

    def spawn(_: str) -> Any:
        return ray.remote(num_cpus=0)(VllmRollout).remote(str(tmp_path))

    first = spawn("e0")
    with WeightSync(replace(CONFIG, connect_timeout_s=patient(120), respawn_timeout_s=patient(120))) as sync:
        sync.register_trainers([trainer], model="actor.model")
        sync.register_engines({"e0": first}, respawn=spawn, llm="llm")
        sync.connect()
        for version in (1, 2, 3):
            wanted = ray.get(trainer.complete.remote(*prompt, version))
            assert sync.update_weights(version).verified
            assert ray.get(first.complete.remote(*prompt)) == wanted
        os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
        assert until(lambda: first not in sync.serving().values() and sync.serving() != {}, patient(120))
        assert sync.engine_versions() == {"e0": 3}
        assert ray.get(sync.engines()["e0"].complete.remote(*prompt)) == wanted


@pytest.mark.faults
@with_vllm
def test_replicas_of_which_vllm_names_only_the_first_are_refused(tmp_path: Path) -> None:
    """The cores of a dense model's replicas do not say that there are others."""
    save_config(tmp_path)
    trainer = ray.remote(num_cpus=0)(TransformersTrainer).remote(str(tmp_path))
    engine = ray.remote(num_cpus=0)(ReplicatedRollout).remote(str(tmp_path))
    with WeightSync(replace(CONFIG, connect_timeout_s=patient(120))) as sync:
        sync.register_trainers([trainer], model="actor.model")
        sync.register_engines({"e0": engine}, llm="llm")
        with pytest.raises(ConfigError, match="data_parallel_size"):
            sync.connect()


@with_vllm
def test_weights_that_others_put_to_sleep_are_not_written_until_others_wake_them(tmp_path: Path) -> None:
    save_config(tmp_path)
    trainer = ray.remote(num_cpus=0)(TransformersTrainer).remote(str(tmp_path))
    imported = {"env_vars": {zygote.IMPORTS: "vllm"}}
    engine = ray.remote(num_cpus=0, runtime_env=imported)(DozingRollout).remote(str(tmp_path))
    prompt = [1, 2, 3], 8
    with WeightSync(replace(CONFIG, connect_timeout_s=patient(120), heal_attempts=0)) as sync:
        sync.register_trainers([trainer], model="actor.model")
        sync.register_engines({"e0": engine}, llm="llm")
        ray.get(engine.doze.remote(["weights", "kv_cache"]))
        with pytest.raises(StateError, match="weights of rank 0 are asleep: wake them"):
            sync.connect()
        ray.get(engine.doze.remote([]))
        sync.connect()
        assert sync.update_weights(1).verified
        ray.get(engine.doze.remote(["weights", "kv_cache"]))
        with pytest.raises(EngineError, match=r"engine e0.*weights of rank 0 are asleep: wake them"):
            sync.update_weights(2)
        ray.get(engine.doze.remote([]))
        wanted = ray.get(trainer.complete.remote(*prompt, 3))
        assert sync.update_weights(3).verified
        assert ray.get(engine.complete.remote(*prompt)) == wanted


def test_an_engine_that_the_actor_replaced_is_not_called_verified() -> None:
    trainer = ray.remote(num_cpus=0)(PlainTrainer).remote()
    engine = ray.remote(num_cpus=0)(PlainEngine).remote()
    with WeightSync(replace(CONFIG, timeout_s=patient(2))) as sync:
        sync.register_trainers([trainer], model="actor.model")
        sync.register_engines({"e0": engine}, llm="llm")
        sync.connect()
        assert sync.update_weights(1).verified
        ray.get(engine.start_another.remote())
        with pytest.raises(WeightSyncError):
            sync.update_weights(2)
        assert sync.serving() == {}


@pytest.mark.parametrize("kinds", [(PlainTrainer, PlainEngine), (AsyncTrainer, AsyncEngine)])
def test_actors_that_ray_starts_again_serve_and_publish_nothing_before_they_are_connected(
    kinds: tuple[type, type],
) -> None:
    trainer, first, second = (
        ray.remote(num_cpus=0, max_restarts=1)(each).remote() for each in (kinds[0], kinds[1], kinds[1])
    )

    def kill(actor: Any) -> None:
        os.kill(pid := ray.get(ask_pid(actor)), signal.SIGKILL)

        def is_new() -> bool:
            with suppress(RayError):
                return bool(ray.get(ask_pid(actor)) != pid)
            return False

        assert until(is_new, patient(30))

    def update(version: int) -> None:
        trained = ray.get(trainer.train.remote(version))
        report = sync.update_weights(version)
        assert (report.verified, report.failures) == (True, {})
        for engine in (first, second):
            weights = ray.get(engine.weights.remote())
            assert all(torch.equal(weights[name], each) for name, each in trained.items())

    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer], model="actor.model")
        sync.register_engines({"e0": first, "e1": second}, llm="llm")
        sync.connect()
        update(1)
        kill(second)
        assert until(lambda: "e1" not in sync.serving(), patient(15))
        assert until(lambda: "e1" in sync.serving(), patient(30))
        assert sync.heals[-1].verified
        update(2)
        kill(trainer)
        with pytest.raises(RestartedError, match=r"trainer 0 is gone.*call connect\(\)"):
            sync.update_weights(3)
        assert set(sync.serving()) == {"e0", "e1"}
        sync.connect()
        update(3)


@pytest.mark.parametrize("max_direct_hosts", [publish_relay.MAX_DIRECT_HOSTS, 0], ids=["direct", "relayed"])
def test_another_path_finds_another_model(max_direct_hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_relay, "MAX_DIRECT_HOSTS", max_direct_hosts)
    trainer = ray.remote(num_cpus=0)(PlainTrainer).remote()
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": (engine := ray.remote(num_cpus=0)(PlainEngine).remote())}, llm="llm")
        for version, path in enumerate(("actor.model", "critic"), 1):
            sync.register_trainers([trainer], model=path)
            sync.connect()
            assert sync.update_weights(version).verified
            wanted = ray.get(trainer.weights.remote(path))
            held = ray.get(engine.weights.remote())
            assert all(torch.equal(held[name], each) for name, each in wanted.items())


def test_the_example_of_the_guide_runs() -> None:
    policies = [ray.remote(num_cpus=0)(PlainTrainer).remote()]
    rollout = ray.remote(num_cpus=0)(AsyncEngine).remote()
    names = {"policies": policies, "rollout": rollout, "WeightSync": lambda: WeightSync(CONFIG)}
    replaced = {', options={"exclude": ["value_head.*"]}': ""}
    with run_block("docs/guide.md", 7, names, replaced)["sync"] as sync:
        trained = ray.get(policies[0].train.remote(1))
        assert sync.update_weights(1).verified
        weights = ray.get(rollout.weights.remote())
        assert all(torch.equal(weights[name], each) for name, each in trained.items())


def test_a_path_that_does_not_exist_is_refused_by_name() -> None:
    trainer = ray.remote(num_cpus=0)(PlainTrainer).remote()
    engine = ray.remote(num_cpus=0)(AsyncEngine).remote()
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer], model="actor.modle")
        sync.register_engines({"e0": engine}, llm="llm")
        with pytest.raises(ConfigError, match=r"model.*actor\.modle.*has no attribute 'modle'.*model"):
            sync.connect()


def test_an_option_that_does_not_exist_is_refused_by_name() -> None:
    trainer = ray.remote(num_cpus=0)(PlainTrainer).remote()
    engine = ray.remote(num_cpus=0)(PlainEngine).remote()
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer], model="actor.model", options={"exlude": ["value_head.*"]})
        sync.register_engines({"e0": engine}, llm="llm")
        with pytest.raises(ConfigError, match="options: 'exlude' is not valid; did you mean 'exclude'"):
            sync.connect()


def test_other_objects_are_no_engines() -> None:
    trainer = ray.remote(num_cpus=0)(PlainTrainer).remote()
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer], model="actor.model")
        sync.register_engines({"e0": trainer}, llm="actor.model")
        with pytest.raises(WeightSyncError, match=r"llm.*Sequential of PlainTrainer.*AsyncLLM"):
            sync.connect()


def test_a_path_is_for_actors_of_other_classes_alone() -> None:
    trainer = ray.remote(num_cpus=0)(PlainTrainer).remote()
    with WeightSync(CONFIG) as sync, pytest.raises(ConfigError, match="TrainerShard"):
        sync.register_trainers([trainer])
