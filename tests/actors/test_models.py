"""Two models with trainers and engines of their own: they commit together, or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Trainer, forget, spawn, until
from tests.pages import run_block
from tests.patience import patient
from weightsync import ConfigError, StateError, SyncConfig, VerifyError, WeightSync, WeightSyncError
from weightsync.faults import Fault, FaultPlan

BOTH = ["model", "reward"]
WIDTHS = {"model": 64, "reward": 32}
CONFIG = SyncConfig(bucket_bytes=8192, timeout_s=patient(10), heal_backoff_s=0.1)

Weights = Mapping[str, torch.Tensor]


class Pool:
    """Actors for all tests of this file: starting one takes longer than most tests."""

    def __init__(self) -> None:
        self._actors: dict[tuple[object, ...], Any] = {}

    def get(self, cls: type, *args: object) -> Any:
        """Return the actor made of these arguments."""
        if (cls, args) not in self._actors:
            self._actors[cls, args] = spawn(cls, *args)
        elif cls is Engine:
            forget([self._actors[cls, args]])
        return self._actors[cls, args]

    def kill(self, actor: Any) -> None:
        """Kill its process, and forget it."""
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        self._actors = {key: other for key, other in self._actors.items() if other is not actor}


class Fleet:
    """A policy on two engines, and a reward model on one."""

    def __init__(self, pool: Pool) -> None:
        self.policy = WeightSync(CONFIG)
        self.reward = self.policy.add_model("reward")
        self.syncs = {"model": self.policy, "reward": self.reward}
        for model, sync in self.syncs.items():
            width = WIDTHS[model]
            sync.register_trainers([pool.get(Trainer, width, f"{model}-trainer")])
            names = ("e0", "e1") if model == "model" else ("r0",)
            sync.register_engines(
                {name: pool.get(Engine, width, name, name) for name in names},
                lambda name, width=width: pool.get(Engine, width, name, name),  # type: ignore[misc]
            )

    def train(self, seed: int) -> dict[str, Weights]:
        """Give both trainers other weights, and return these."""
        trainers = {model: sync.trainers()[0] for model, sync in self.syncs.items()}
        ray.get([trainer.train.remote(seed) for trainer in trainers.values()])
        return {model: ray.get(trainer.weights.remote()) for model, trainer in trainers.items()}

    def commit(self, seed: int) -> tuple[dict[str, Weights], int]:
        """Update both. Returns their weights, and the version."""
        wanted = self.train(seed)
        report = self.policy.update_weights(components=BOTH)
        assert {its.verified for its in report.components.values()} == {True}
        assert self.hold(wanted, report.version)
        return wanted, report.version

    def hold(self, wanted: Mapping[str, Weights], version: int) -> bool:
        """Whether all engines serve `version`, with these weights."""
        for model, sync in self.syncs.items():
            for handle in sync.engines().values():
                found = ray.get(handle.weights.remote())
                if any(not torch.equal(found[name], value) for name, value in wanted[model].items()):
                    return False
            if set(sync.engine_versions().values()) != {version} or sync.serving() != sync.engines():
                return False
        return True


@pytest.fixture(scope="module")
def pool(cluster: None) -> Pool:
    return Pool()


@pytest.fixture(scope="module")
def fleet(pool: Pool) -> Iterator[Fleet]:
    made = Fleet(pool)
    made.policy.connect()
    yield made
    made.policy.close()


def test_both_commit_one_version_and_each_has_its_own(fleet: Fleet) -> None:
    wanted = fleet.train(1)
    report = fleet.policy.update_weights(components=BOTH)
    assert {name: its.engines for name, its in report.components.items()} == {
        "model": {"e0": 1, "e1": 1},
        "reward": {"r0": 1},
    }
    assert report.engines == {"e0": 1, "e1": 1}
    assert report.to_dict()["components"]
    assert fleet.hold(wanted, 1)
    rows = {(row.engine, row.component, row.version) for row in fleet.policy.coverage()}
    assert rows == {("e0", "model", 1), ("e1", "model", 1), ("r0", "reward", 1)}
    assert not fleet.policy.update_weights().components
    assert fleet.reward.update_weights(7).engines == {"r0": 7}
    assert (fleet.policy.version, fleet.reward.version) == (2, 7)
    wanted = fleet.train(2)
    assert fleet.policy.update_weights(components=BOTH[::-1]).engines == {"r0": 8}
    assert fleet.hold(wanted, 8)


@pytest.mark.parametrize("failing", BOTH)
def test_neither_commits_if_one_is_wrong(fleet: Fleet, failing: str) -> None:
    wanted, version = fleet.commit(1)
    fleet.train(2)
    engines = fleet.syncs[failing].engines()
    flips = [Fault(process=f"engine {name}", action="corrupt", at="move") for name in engines]
    fleet.syncs[failing].inject(FaultPlan(tuple(flips)))
    with pytest.raises(VerifyError, match=f"engine {next(iter(engines))}"):
        fleet.policy.update_weights(components=BOTH)
    assert (fleet.policy.version, fleet.reward.version) == (version, version)
    for sync in fleet.syncs.values():
        assert set(sync.engine_versions().values()) <= {0, version}
    assert until(lambda: fleet.hold(wanted, version), patient(30)), "holders bring back what had committed"
    assert fleet.commit(3)[1] == version + 1


def test_a_model_is_updated_by_one_call_at_a_time(fleet: Fleet) -> None:
    _, version = fleet.commit(1)
    both = fleet.policy.update_weights_async(components=BOTH)
    with pytest.raises(StateError, match="an update is running"):
        fleet.reward.update_weights()
    assert both.result(patient(30)).version == version + 1
    alone = fleet.policy.update_weights_async()
    assert fleet.reward.update_weights().engines == {"r0": version + 2}, "they need not wait for each other"
    assert alone.result(patient(30)).version == version + 2


def test_names_that_mean_something_else_are_refused(fleet: Fleet) -> None:
    for name in ("", "a/b", "model", "draft", "adapter math", "reward", 3):
        with pytest.raises(ConfigError, match="name"):
            fleet.policy.add_model(name)  # type: ignore[arg-type]
    fleet.policy.add_model("third").close()
    fleet.policy.add_model("third").close()
    fleet.policy.connect()
    assert {row.component for row in fleet.policy.coverage()} == {"model", "reward"}
    with pytest.raises(ConfigError, match="components: 'third' is not valid"):
        fleet.policy.update_weights(components=["model", "third"])
    with pytest.raises(ConfigError, match="components: 'rewards' is not valid; did you mean 'reward'"):
        fleet.policy.update_weights(components=["model", "rewards"])
    with pytest.raises(ConfigError, match="versions grow"):
        fleet.policy.update_weights(0, components=BOTH)


def test_a_trainer_that_is_gone_keeps_both_from_the_version(fleet: Fleet, pool: Pool) -> None:
    wanted, version = fleet.commit(1)
    pool.kill(fleet.reward.trainers()[0])
    with pytest.raises(WeightSyncError, match="trainer 0"):
        fleet.policy.update_weights(components=BOTH)
    assert fleet.policy.version == version
    assert until(lambda: fleet.hold(wanted, version), patient(30))
    fleet.reward.register_trainers([pool.get(Trainer, WIDTHS["reward"], "reward-trainer")])
    fleet.reward.connect()
    fleet.commit(2)


@pytest.mark.faults
def test_fifty_versions_with_an_engine_killed_in_every_tenth(fleet: Fleet, pool: Pool) -> None:
    fleet.commit(0)
    for number in range(1, 51):
        if number % 10 == 5:
            sync = fleet.syncs[BOTH[number // 10 % 2]]
            before = len(sync.heals)
            pool.kill(next(iter(sync.engines().values())))
            assert until(lambda: len(sync.heals) > before, patient(60))  # noqa: B023 - called here
            sync.settle(patient(30))
        fleet.commit(number)


def test_the_pages_block_prints_what_is_served(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"WeightSync": WeightSync}
    for model, width, engines in (("policy", 64, ("e0", "e1")), ("reward", 32, ("r0",))):
        names[f"{model}_trainers"] = [pool.get(Trainer, width, f"{model}-of-page")]
        names[f"{model}_engines"] = {name: pool.get(Engine, width, name, f"{name}-page") for name in engines}
    run_block("docs/components.md", 0, names)
    printed = "\n".join(capsys.readouterr().out.splitlines()[-3:])
    assert printed in (Path(__file__).parents[2] / "docs/components.md").read_text(encoding="utf-8"), printed
