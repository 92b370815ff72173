"""Real vLLMs over Ray, with a draft that trainers hold: it switches in the model's versions."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from transformers import AutoModelForCausalLM

from tests.contract.vllm_speculation import check_live
from tests.fleets.actors import spawn, until
from tests.models import build_tiny_eagle, build_tiny_qwen3, greedy
from tests.pages import run_block
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, TrainerShard, WeightSync
from weightsync.errors import PlanError, VerifyError
from weightsync.faults import Fault, FaultPlan

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(
    bucket_bytes=16 << 10,  # so that the last of many buckets has a part of the draft
    timeout_s=patient(30),
    connect_timeout_s=patient(120),
    heartbeat_s=patient(1),
    components={"draft": "trained"},
)
PROMPTS = [[5, 9, 3, 7], [11, 2, 30]]
GREEDY: Mapping[str, Any] = {"max_tokens": 16, "temperature": 0.0}


class Fleet:
    """A trainer of a model, one of a draft that equals it, and engines that have read neither."""

    def __init__(self, folder: Path, method: str = "draft_model", num_ranks: int = 1) -> None:
        from tests.fleets.draft_trainer import DraftTrainer

        self.folder, self.method, self.num_ranks = folder, method, num_ranks
        build_tiny_qwen3(folder / "model", seed=0)
        model, draft = str(folder / "model"), str(folder / "draft")
        if method == "draft_model":
            build_tiny_qwen3(folder / "draft", seed=0)
            self.trainers = [spawn(DraftTrainer, model), spawn(DraftTrainer, "", draft)]
        else:
            build_tiny_eagle(folder / "draft", third=method == "eagle3", seed=1)
            self.trainers = [spawn(DraftTrainer, model, "", draft)]
        ray.get([trainer.sync_placement.remote() for trainer in self.trainers])  # have read their files
        self.engines: dict[str, ActorHandle[Any]] = {}

    def spawn(self, name: str) -> ActorHandle[Any]:
        from tests.fleets.draft_engine import DraftEngine

        speculative = {
            "method": self.method,
            "model": str(self.folder / "draft"),
            "num_speculative_tokens": 2,
            "draft_tensor_parallel_size": self.num_ranks,
        }
        options: dict[str, Any] = {"speculative_config": speculative, "max_model_len": 64}
        options["tensor_parallel_size"] = self.num_ranks
        model = str(self.folder / "model")
        self.engines[name] = spawn(DraftEngine, "vllm", model, name, options, name)
        return self.engines[name]

    def register_checkpoint(self, sync: WeightSync, *names: str) -> None:
        """Take both from files, in place of trainers."""
        sync.register_engines({name: self.spawn(name) for name in names}, respawn=self.spawn)
        sync.register_checkpoint("both", [str(self.folder / "model")], draft=[str(self.folder / "draft")])

    def register(self, sync: WeightSync, *names: str) -> None:
        for weights in (self.folder / "model", self.folder / "draft"):
            if self.method == "draft_model":  # EAGLE's tensors are known from their files alone
                (weights / "model.safetensors").unlink()
        sync.register_trainers(self.trainers)
        sync.register_engines({name: self.spawn(name) for name in names}, respawn=self.spawn)

    def train(self, part: str, seed: int) -> None:
        trainer = self.trainers[-1 if part == "draft" else 0]
        ray.get(trainer.train.remote(part, seed))

    def ask(self, engine: str) -> tuple[list[list[int]], float]:
        """Return greedy tokens, and the part of the drafted ones that were accepted."""
        handle = self.engines[engine]
        before = ray.get(handle.draft_counts.remote())
        tokens = ray.get(handle.generate.remote(PROMPTS, GREEDY), timeout=patient(60)).tokens
        counts = ray.get(handle.draft_counts.remote()).since(before)
        return tokens, counts.acceptance

    def check_draft(self, engine: str) -> None:
        """Compare each byte of the engine's draft with its trainer's."""
        live, trained = ray.get(
            [self.engines[engine].live_draft.remote(), self.trainers[-1].weights.remote("draft")]
        )
        check_live(live, trained)

    def close(self) -> None:
        """End all engines. A killed one leaves its ranks' shared memory."""
        ending = [engine.close.remote() for engine in self.engines.values()]
        ray.wait(ending, num_returns=len(ending), timeout=patient(30))
        for each in (*self.engines.values(), *self.trainers):
            ray.kill(each)


@pytest.fixture
def method() -> str:
    return "draft_model"


@pytest.fixture
def num_ranks() -> int:
    return 1


@pytest.fixture
def fleet(tmp_path: Path, method: str, num_ranks: int) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, method, num_ranks)
    yield fleet
    fleet.close()


@pytest.mark.slow
def test_a_draft_follows_its_trainer_in_the_models_versions(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0")
        sync.connect()
        assert sync.update_weights(1).engines == {"e0": 1}
        fleet.check_draft("e0")
        first, accepted = fleet.ask("e0")
        assert accepted == 1, "the draft equals the target"
        fleet.train("model", 1)
        sync.update_weights(2)
        fleet.check_draft("e0")
        tokens, accepted = fleet.ask("e0")
        assert tokens != first
        assert accepted < 0.5, "the target alone changed"
        fleet.train("draft", 1)
        sync.update_weights(3)
        fleet.check_draft("e0")
        assert fleet.ask("e0") == (tokens, 1)
        model, draft = sync.coverage()
        assert (model.component, draft.component) == ("model", "draft")
        assert replace(draft, component="model") == model, "one plan, one verification"
        assert str(draft) == "e0, draft: version 3, what its loader got; 24 tensors, 461 kB"
        fleet.train("model", 2)
        fleet.train("draft", 2)
        flip = Fault(process="engine e0", action="corrupt", at="move", bucket="last")
        sync.inject(FaultPlan((flip,)))
        with pytest.raises(VerifyError, match=r"draft/model\.") as caught:
            sync.update_weights(4)
        assert all(name.startswith("draft/") for name in caught.value.tensors)
        assert (sync.version, sync.engine_versions()) == (3, {"e0": 0})
        assert [row.version for row in sync.coverage()] == [0, 0]
        assert until(lambda: sync.engine_versions()["e0"] == 3, patient(60)), "healed, with both"
        sync.settle(patient(60))
        assert fleet.ask("e0") == (tokens, 1)
        sync.update_weights(5)
        fleet.check_draft("e0")
        assert fleet.ask("e0")[1] == 1


@pytest.mark.faults
def test_a_killed_engine_comes_back_with_both(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0", "e1")
        sync.connect()
        for part in ("model", "draft"):
            fleet.train(part, 1)
        sync.update_weights(1)
        answer = fleet.ask("e0")
        assert answer[1] == 1
        os.kill(ray.get(fleet.engines["e0"].pid.remote()), signal.SIGKILL)
        assert until(lambda: len(sync.heals) == 1, patient(120))
        sync.settle(patient(60))
        assert sync.engine_versions() == {"e0": 1, "e1": 1}
        assert fleet.ask("e0") == answer
        fleet.check_draft("e0")
        assert [row.version for row in sync.coverage() if row.component == "draft"] == [1, 1]
        sync.add_engine("e2", fleet.spawn("e2"))
        assert fleet.ask("e2") == answer
        fleet.check_draft("e2")


@pytest.mark.faults
def test_trainers_without_the_draft_are_refused_with_both_remedies(fleet: Fleet) -> None:
    fleet.trainers, (draft,) = fleet.trainers[:1], fleet.trainers[1:]
    told = r"draft/model\.embed_tokens\.weight: .*register trainers that hold it.*\{\"draft\": \"frozen\"\}"
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0")
        with pytest.raises(PlanError, match=told):
            sync.connect()
        sync.register_trainers([*fleet.trainers, draft])
        sync.connect()
        sync.update_weights(1)
        assert fleet.ask("e0")[1] == 1
    fleet.trainers.append(draft)


@pytest.mark.faults
@pytest.mark.parametrize("num_ranks", [2])
def test_each_of_two_ranks_gets_its_part_of_the_draft(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0")
        sync.connect()
        for version, model, draft in ((1, 0, 0), (2, 1, 0), (3, 1, 1)):
            fleet.train("model", model)
            fleet.train("draft", draft)
            assert sync.update_weights(version).engines == {"e0": version}
            accepted = fleet.ask("e0")[1]
            assert accepted == 1 if model == draft else accepted < 0.5


@pytest.mark.faults
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_eagle_draft_beside_its_model(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync, "e0", "e1")
        sync.connect()
        for version in (1, 2):
            fleet.train("model", version)
            fleet.train("draft", version)
            assert sync.update_weights(version).engines == {"e0": version, "e1": version}
            for name in fleet.engines:
                fleet.check_draft(name)
        os.kill(ray.get(fleet.engines["e0"].pid.remote()), signal.SIGKILL)
        assert until(lambda: len(sync.heals) == 1, patient(120))
        sync.settle(patient(60))
        fleet.check_draft("e0")
        assert fleet.ask("e0") == fleet.ask("e1")


@pytest.mark.faults
def test_a_staged_version_has_the_draft(fleet: Fleet) -> None:
    with WeightSync(replace(CONFIG, stage="host")) as sync:
        fleet.register(sync, "e0")
        sync.connect()
        for version in (1, 2):
            fleet.train("model", version)
            fleet.train("draft", version)
            sync.update_weights(version)
            fleet.check_draft("e0")
            assert fleet.ask("e0")[1] == 1


@pytest.mark.faults
def test_a_checkpoint_of_both_comes_before_trainers(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register_checkpoint(sync, "e0")
        sync.connect()
        sync.update_weights(checkpoint="both")
        answer = fleet.ask("e0")
        assert answer[1] == 1
        fleet.check_draft("e0")
        fleet.train("model", 1)
        sync.register_trainers(fleet.trainers)
        sync.connect()
        sync.update_weights(2)
        fleet.check_draft("e0")
        tokens, accepted = fleet.ask("e0")
        assert tokens != answer[0]
        assert accepted < 0.5


@pytest.mark.faults
def test_an_engine_that_its_user_made_follows_the_same_rules(fleet: Fleet) -> None:
    from tests.fleets.draft_engine import OwnEngine

    model, draft = (str(fleet.folder / name) for name in ("model", "draft"))
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
    engine = spawn(OwnEngine, model, speculative)
    with WeightSync(CONFIG) as sync:
        sync.register_trainers(fleet.trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        for version in (1, 2):
            fleet.train("model", version)
            fleet.train("draft", 0)
            assert sync.update_weights(version).engines == {"e0": version}
            trained = build_tiny_qwen3(fleet.folder / "twin", seed=version)
            asked = engine.generate.remote(PROMPTS[0], 16)
            assert ray.get(asked, timeout=patient(60)) == greedy(trained, PROMPTS[:1])[0]
        assert [(row.component, row.version) for row in sync.coverage()] == [("model", 2), ("draft", 2)]
    ray.get(engine.end.remote())
    ray.kill(engine)


@pytest.mark.faults
def test_the_pages_block_prints_what_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("base", 0), ("draft", 1)):
        build_tiny_qwen3(tmp_path / name, seed=seed)
    names: dict[str, Any] = {"ray": ray, "WeightSync": WeightSync}
    names |= {"SyncConfig": SyncConfig, "EngineActor": EngineActor, "TrainerShard": TrainerShard}
    names |= {"AutoModelForCausalLM": AutoModelForCausalLM}
    names |= {"path": str(tmp_path / "base"), "draft_path": str(tmp_path / "draft")}
    names = run_block("docs/drafts.md", 1, names)
    printed = capsys.readouterr().out
    assert "e0, model: version 1, what its loader got; 24 tensors, 461 kB" in printed
    assert "e0, draft: version 1, what its loader got; 24 tensors, 461 kB" in printed
    ray.kill(names["engine"])
    ray.kill(names["trainer"])
