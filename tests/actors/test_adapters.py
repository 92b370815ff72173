"""LoRA adapters that PEFT and ZeRO-3 train, in slots and merged: tokens equal PEFT's own forward pass."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from tests.fleets.actors import spawn, until
from tests.models import build_tiny_qwen3
from tests.pages import run_block
from tests.patience import patient
from weightsync import ConfigError, EngineActor, PlanError, SyncConfig, SyncReport, WeightSync
from weightsync.engines import Rollout
from weightsync.errors import EngineError, PeerLostError, StateError, WeightSyncError

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed"),
    pytest.mark.timeout(300),
]
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
needs_deepspeed = pytest.mark.skipif(
    not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed"
)

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(120), heartbeat_s=patient(1))
OPTIONS: Mapping[str, Any] = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8, "max_model_len": 64}
RANKS = {"default": 4, "second": 8}
"""PEFT's adapters, and the rank of each."""
PROMPT = [5, 9, 3, 7]
GREEDY: Mapping[str, Any] = {"max_tokens": 8, "temperature": 0.0}


class Rig:
    """Trainer ranks, a reference trainer with the same weights, and engines that serve a base model."""

    def __init__(self, sync: WeightSync, folder: Path, options: Mapping[str, Any], world: int = 1) -> None:
        from tests.fleets.lora_trainer import LoraTrainer, NamedEngine

        self.sync, self.path = sync, str(folder / "base")
        build_tiny_qwen3(folder / "base")
        build_tiny_qwen3(folder / "other", seed=1)
        self._spawn = lambda name: spawn(NamedEngine, "vllm", self.path, name, options)
        self.engines: dict[str, Any] = {"e0": self._spawn("e0")}
        self.trainers = [spawn(LoraTrainer, self.path, RANKS, rank, world) for rank in range(world)]
        self.reference = self.trainers[0]
        if world > 1:
            self.reference = spawn(LoraTrainer, self.path, RANKS)
        alone = [] if world == 1 else [self.reference.start.remote()]
        ray.get(alone + [each.start.remote(str(folder / "meeting")) for each in self.trainers])
        sync.register_engines(self.engines, respawn=self.respawn)
        for name in ("base", "other"):
            sync.register_checkpoint(name, [str(folder / name)])
        sync.connect()
        sync.update_weights(1, checkpoint="base")

    def respawn(self, name: str) -> ActorHandle[Any]:
        self.engines[name] = self._spawn(name)
        return self.engines[name]

    def train(self, adapter: str, seed: int) -> None:
        everyone = {*self.trainers, self.reference}
        ray.get([each.train.remote(adapter, seed) for each in everyone])

    def ask(self, adapter: str, **sampling: object) -> Rollout:
        settings = {**GREEDY, **sampling, "adapter": adapter}
        return ray.get(self.engines["e0"].generate.remote([PROMPT], settings), timeout=patient(60))

    def expected(self, adapter: str, prompt: Sequence[int] = PROMPT) -> list[int]:
        """Return what PEFT answers with an adapter of its own name."""
        return ray.get(self.reference.answers.remote(adapter, prompt, GREEDY["max_tokens"]))

    def answers_as_peft(self, adapter: str, peft: str, version: int) -> bool:
        """Compare tokens, and at each place the log-probabilities of the likeliest ones."""
        ray.get(self.engines["e0"].keep_scores.remote())
        rollout = self.ask(adapter)
        assert (rollout.adapter, rollout.adapter_version) == (adapter, version)
        (tokens,), found = rollout.tokens, ray.get(self.engines["e0"].scores.remote())
        wanted = ray.get(self.reference.scores.remote(peft, PROMPT, tokens))
        assert len(found) == len(tokens) == len(wanted)
        for its, place in zip(found, wanted, strict=True):
            assert its == pytest.approx({token: float(place[token]) for token in its}, abs=1e-3)
        return tokens == self.expected(peft)

    def close(self) -> None:
        """End all actors. Engines end by themselves, since a killed one leaves its ranks' shared memory."""
        ray.wait(
            [each.close.remote() for each in self.engines.values()],
            num_returns=len(self.engines),
            timeout=patient(30),
        )
        for actor in (*self.engines.values(), *self.trainers, self.reference):
            ray.kill(actor)


@pytest.fixture
def options() -> Mapping[str, Any]:
    return OPTIONS


@pytest.fixture
def world() -> int:
    return 1


@pytest.fixture
def rig(tmp_path: Path, options: Mapping[str, Any], world: int) -> Iterator[Rig]:
    with WeightSync(CONFIG) as sync:
        rig = Rig(sync, tmp_path, options, world)
        yield rig
    rig.close()


def check_versions(rig: Rig, versions: Sequence[int]) -> None:
    """Two adapters of different ranks, in turns, each with its own versions."""
    sync = rig.sync
    sync.register_adapter("math", rig.trainers)
    sync.register_adapter("code", rig.trainers, adapter="second")
    plain = rig.ask("")
    assert plain.tokens == [rig.expected("")]
    seen = set()
    for version in versions:
        for name, peft, seed in (("math", "default", version), ("code", "second", -version)):
            rig.train(peft, seed)
            ray.get([each.answers.remote(peft, PROMPT, 1) for each in rig.trainers])  # FSDP gathers them
            report = sync.update_adapter(name)
            assert report.verified
            assert (report.version, report.engines) == (version, {"e0": version})
            assert report.proofs == {"e0": "live weights"}
            assert rig.answers_as_peft(name, peft, version)
            seen.add(tuple(rig.ask(name).tokens[0]))
    assert len(seen) > len(versions), "other weights, other answers"
    assert rig.ask("") == plain
    assert sync.adapter_versions() == {"math": versions[-1], "code": versions[-1]}
    model, *adapters = sync.coverage()
    assert (model.component, model.version, model.num_tensors) == ("model", 1, len(sync.plan.tensors))
    assert str(model).startswith("e0, model: version 1, what its loader got; 24 tensors, ")
    assert [str(row).split(";")[0] for row in adapters] == [
        f"e0, adapter {name}: version {versions[-1]}, live weights" for name in ("math", "code")
    ]
    assert [row.num_tensors for row in adapters] == [20, 20], "A and B of five modules in two layers"


@needs_vllm
@pytest.mark.slow
def test_each_version_of_each_adapter_answers_as_peft_does(rig: Rig) -> None:
    check_versions(rig, range(1, 4))
    sync = rig.sync
    sync.update_weights(2, checkpoint="other")  # a base that moves leaves the adapters in place
    assert rig.ask("math").tokens != [rig.expected("default")]
    rig.train("default", 4)
    report = sync.update_weights(4, checkpoint="base", components=["model", "adapter math"])
    assert [its.engines for its in report.components.values()] == [{"e0": 4}, {"e0": 4}]
    assert rig.answers_as_peft("math", "default", 4)
    with pytest.raises(ConfigError, match=r"options.max_loras: 4 .* give at least 6"):
        sync.register_adapter("third", rig.trainers)
    with pytest.raises(ConfigError, match=r"adapter: 'secnd' .* did you mean 'second'"):
        sync.register_adapter("third", rig.trainers, adapter="secnd")
    with pytest.raises(ConfigError, match=r"name: 'maths' .* did you mean 'math'"):
        sync.update_adapter("maths")
    with pytest.raises(ConfigError, match=r"sampling.adapter: 'coda' .* did you mean 'code'"):
        rig.ask("coda")
    sync.unregister_adapter("math")
    with pytest.raises(ConfigError, match=r"sampling.adapter: 'math'"):
        rig.ask("math")
    sync.register_adapter("third", rig.trainers)
    with pytest.raises(StateError, match="adapter third of engine e0 has no version yet"):
        rig.ask("third")
    time.sleep(1.5 * CONFIG.heartbeat_s)  # those of the adapter that was unregistered have ended
    with pytest.raises(ConfigError, match=r"sampling.adapter: 'math'"):
        rig.ask("math")
    sync.update_adapter("third", 7)
    assert rig.answers_as_peft("third", "default", 7)


@needs_vllm
@pytest.mark.faults
@pytest.mark.parametrize("options", [{**OPTIONS, "block_size": 32}])
def test_a_version_that_is_counted_anew_does_not_find_the_caches_of_the_old_one(rig: Rig) -> None:
    """vLLM keeps what it computed of whole blocks of a prompt, by the request's name of the adapter."""
    prompt = [*range(3, 48)]
    asked = {**GREEDY, "adapter": "math"}
    for seed in (1, 2):
        rig.train("default", seed)
        rig.sync.register_adapter("math", rig.trainers)
        rig.sync.update_adapter("math", 1)
        for _ in range(2):
            found = ray.get(rig.engines["e0"].generate.remote([prompt], asked)).tokens
            assert found == [rig.expected("default", prompt)]
        rig.sync.unregister_adapter("math")


@needs_vllm
@pytest.mark.faults
@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("options", [{**OPTIONS, "tensor_parallel_size": 2}])
def test_two_fsdp2_ranks_train_what_two_tensor_parallel_ranks_serve(rig: Rig) -> None:
    check_versions(rig, range(1, 11))


@needs_vllm
@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "options", "rank", "targets", "says"),
    [
        ("vllm", {}, 4, ["q_proj"], r"options.enable_lora: False .* start the engine with true"),
        ("vllm", OPTIONS, 16, ["q_proj"], r"options.max_lora_rank: 8 .* give at least 16"),
        ("vllm", {**OPTIONS, "max_loras": 1}, 4, ["q_proj"], r"options.max_loras: 1 .* give at least 2"),
        (
            "vllm",
            OPTIONS,
            4,
            ["q_proj", "lm_head"],
            r"has no slot for lm_head.lora_A.weight: leave lm_head out",
        ),
        ("torch", {}, 4, ["q_proj"], r"adapter: 'TorchEngine' .* serve adapters with vLLM"),
    ],
)
def test_what_does_not_fit_an_engine_is_refused_by_name(
    kind: str, options: Mapping[str, Any], rank: int, targets: list[str], says: str, tmp_path: Path
) -> None:
    from tests.fleets.lora_trainer import LoraTrainer

    path = str(tmp_path / "base")
    build_tiny_qwen3(tmp_path / "base")
    trainer = spawn(LoraTrainer, path, {"default": rank}, 0, 1, targets)
    engine = spawn(EngineActor, kind, path, "e0", options)
    ray.get(trainer.start.remote())
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        with pytest.raises(StateError, match="connect"):
            sync.register_adapter("math", [trainer])
        sync.connect()
        sync.update_weights(checkpoint="base")
        with pytest.raises((ConfigError, PlanError), match=says):
            sync.register_adapter("math", [trainer])
        assert sync.adapter_versions() == {}
        assert sync.update_weights(checkpoint="base").engines == {"e0": 2}
    for actor in (trainer, engine):
        ray.kill(actor)


@needs_vllm
@pytest.mark.faults
def test_the_pages_loop_prints_each_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.fleets.lora_trainer import LoraTrainer

    path = str(tmp_path / "base")
    build_tiny_qwen3(tmp_path / "base")
    trainer = spawn(LoraTrainer, path, RANKS)
    ray.get(trainer.start.remote())
    names = {"ray": ray, "WeightSync": WeightSync, "EngineActor": EngineActor, "path": path}
    names |= {"trainers": [trainer], "prompts": [PROMPT]}
    names = run_block("docs/adapters.md", 0, names)
    printed = capsys.readouterr().out
    assert [f"math {version} " in printed for version in (1, 2, 3)] == [True] * 3
    assert printed.count("verified") == 3
    for actor in (trainer, names["engine"]):
        ray.kill(actor)


@needs_vllm
@pytest.mark.faults
def test_requests_end_with_the_version_with_which_they_began(rig: Rig) -> None:
    """Long requests run throughout twenty updates, several of them at any time."""
    rig.train("default", 1)
    rig.sync.register_adapter("math", rig.trainers)
    rig.sync.update_adapter("math", 1)
    expected = {1: tuple(ray.get(rig.reference.answers.remote("default", PROMPT, 48)))}
    rollouts: list[Rollout] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            rollouts.append(rig.ask("math", max_tokens=48))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(2, 21):
        rig.train("default", version)
        expected[version] = tuple(ray.get(rig.reference.answers.remote("default", PROMPT, 48)))
        assert rig.sync.update_adapter("math", version).verified
    over.set()
    for thread in threads:
        thread.join()
    assert len({rollout.adapter_version for rollout in rollouts}) > 5
    for rollout in rollouts:
        assert tuple(rollout.tokens[0]) == expected[rollout.adapter_version]


@needs_vllm
@pytest.mark.faults
def test_a_slot_that_others_had_vllm_give_away_is_not_written_and_not_called_verified(rig: Rig) -> None:
    rig.sync.register_adapter("math", rig.trainers)
    rig.train("default", 1)
    rig.sync.update_adapter("math")
    assert ray.get(rig.engines["e0"].remove_lora.remote(1 << 20))
    rig.train("default", 2)
    assert rig.sync.update_adapter("math").verified
    assert rig.answers_as_peft("math", "default", 2), "the other slot is still there"
    with pytest.raises(
        EngineError, match=r"engine e0.* slot 1048576 is gone, .*: register the adapter again"
    ):
        rig.sync.update_adapter("math")
    assert rig.answers_as_peft("math", "default", 2)
    rig.sync.unregister_adapter("math")
    rig.sync.register_adapter("math", rig.trainers)
    assert rig.sync.update_adapter("math", 3).verified
    assert rig.answers_as_peft("math", "default", 3)


@needs_vllm
@pytest.mark.faults
def test_a_killed_engine_gets_its_adapters_again(rig: Rig) -> None:
    rig.train("default", 1)
    rig.sync.register_adapter("math", rig.trainers)
    rig.sync.update_adapter("math", 4)
    answer = rig.expected("default")
    rig.train("default", 2)  # the trainer has gone on: it is not asked
    os.kill(ray.get(rig.engines["e0"].pid.remote()), signal.SIGKILL)

    def is_back() -> bool:
        try:
            return rig.ask("math").adapter_version == 4
        except (WeightSyncError, ray.exceptions.RayError):
            return False

    assert until(is_back, patient(120))
    assert rig.ask("math").tokens == [answer]
    assert rig.sync.update_adapter("math").engines == {"e0": 5}
    assert rig.answers_as_peft("math", "default", 5)


@needs_vllm
@pytest.mark.faults
def test_an_engine_that_joins_gets_the_version_that_the_others_serve(rig: Rig) -> None:
    rig.train("default", 1)
    rig.sync.register_adapter("math", rig.trainers)
    rig.sync.update_adapter("math", 3)
    answer = rig.expected("default")
    rig.train("default", 2)
    rig.respawn("e1")
    rig.sync.add_engine("e1", rig.engines["e1"])

    def has_it() -> bool:
        rows = {(row.engine, row.component): row.version for row in rig.sync.coverage()}
        return rows.get(("e1", "adapter math")) == 3

    assert until(has_it, patient(60))
    asked = {**GREEDY, "adapter": "math"}
    assert ray.get(rig.engines["e1"].generate.remote([PROMPT], asked)).tokens == [answer]
    assert rig.sync.update_adapter("math").engines == {"e0": 4, "e1": 4}
    rig.sync.remove_engine("e0")
    assert until(lambda: {row.engine for row in rig.sync.coverage()} == {"e1"}, patient(60))
    assert rig.sync.update_adapter("math").engines == {"e1": 5}

    before, answer = rig.engines["e1"], rig.expected("default")
    rig.sync.register_engines({"e1": rig.respawn("e1")})
    rig.sync.connect()
    rig.sync.update_weights(2, checkpoint="base")

    def answers() -> bool:
        try:
            return ray.get(rig.engines["e1"].generate.remote([PROMPT], asked)).tokens == [answer]
        except (WeightSyncError, ray.exceptions.RayError):
            return False

    assert until(answers, patient(60))
    ray.get(before.close.remote())
    ray.kill(before)


@needs_vllm
@pytest.mark.faults
def test_a_trainer_that_dies_leaves_the_version_that_is_served(rig: Rig) -> None:
    rig.train("default", 1)
    rig.sync.register_adapter("math", rig.trainers)
    rig.sync.update_adapter("math", 1)
    before = rig.ask("math")
    ray.kill(rig.trainers[0])
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="trainer 0"):
        rig.sync.update_adapter("math", 2)
    assert time.monotonic() - begun < patient(20)
    assert rig.ask("math") == before
    assert rig.sync.adapter_versions() == {"math": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "saves"),
    [
        pytest.param(1, [], marks=pytest.mark.faults),
        pytest.param(2, [], marks=pytest.mark.faults),
        (2, ["lm_head", "model.norm"]),
    ],
)
def test_each_version_answers_as_peft_does(world: int, saves: list[str], tmp_path: Path) -> None:
    from tests.fleets.lora_trainer import TARGETS, LoraTrainer

    path = str(tmp_path / "base")
    build_tiny_qwen3(tmp_path / "base", tied=not saves)
    ranks = range(world)
    settings = {"default": 4}, TARGETS, "default", saves
    adapters, *others = settings
    trainers = [spawn(LoraTrainer, path, adapters, rank, world, *others) for rank in ranks]
    reference = spawn(LoraTrainer, path, adapters, 0, 1, *others)
    engine = spawn(EngineActor, "torch", path, "e0")
    started = [trainer.start.remote(str(tmp_path / "meeting")) for trainer in trainers]
    ray.get([*started, reference.start.remote()], timeout=patient(60))
    config = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(60))
    with WeightSync(config) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        seen, moved = set(), []
        for version in range(1, 4):
            ray.get([each.train.remote("default", version) for each in (*trainers, reference)])
            ray.get([each.answers.remote("default", PROMPT, 1) for each in trainers])  # FSDP gathers them
            report = sync.update_weights(version)
            assert report.verified
            rollout = ray.get(engine.generate.remote([PROMPT], GREEDY), timeout=patient(60))
            assert rollout.tokens == [ray.get(reference.answers.remote("default", PROMPT, 8))]
            seen.add(tuple(rollout.tokens[0]))
            moved.append(report.nbytes)
        assert len(seen) == 3, "other weights, other answers"
        assert moved[0] > moved[1] == moved[2], "what nobody trains travels once"
    for actor in (*trainers, reference, engine):
        ray.kill(actor)


def partitioned(folder: Path, merge: str = "") -> tuple[str, list[Any]]:
    """Return the base's path, and two ranks that train an adapter of it."""
    from tests.fleets.zero_lora_trainer import ZeroLoraTrainer

    path = str(folder / "base")
    build_tiny_qwen3(folder / "base")
    trainers = [spawn(ZeroLoraTrainer, path, rank, 2, merge) for rank in range(2)]
    ray.get([each.start.remote(str(folder / "meeting")) for each in trainers], timeout=patient(60))
    return path, trainers


def check_partitioned_versions(
    trainers: Sequence[Any], engine: Any, update: Callable[[], SyncReport], adapter: str
) -> None:
    """Train and update three times, and compare what is answered."""
    seen = set()
    for version in range(1, 4):
        ray.get([each.step.remote() for each in trainers], timeout=patient(60))
        report = update()
        assert report.verified
        assert report.version == version
        sampling = {**GREEDY, "adapter": adapter} if adapter else GREEDY
        rollout = ray.get(engine.generate.remote([PROMPT], sampling), timeout=patient(60))
        # Parameters stay gathered after a forward pass: the next update reads their partitions.
        answers = ray.get([each.answers.remote("default", PROMPT, 8) for each in trainers])
        assert [rollout.tokens[0]] * 2 == answers
        seen.add(tuple(rollout.tokens[0]))
    assert len(seen) == 3, "other weights, other answers"


@pytest.mark.faults
@needs_deepspeed
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_each_version_in_slots_answers_as_peft_does(tmp_path: Path) -> None:
    path, trainers = partitioned(tmp_path)
    engine = spawn(EngineActor, "vllm", path, "e0", OPTIONS)
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        sync.register_adapter("math", trainers)
        check_partitioned_versions(trainers, engine, lambda: sync.update_adapter("math"), "math")
    ray.wait([engine.close.remote()], timeout=patient(30))
    for actor in (engine, *trainers):
        ray.kill(actor)


@pytest.mark.faults
@needs_deepspeed
def test_each_version_that_is_merged_answers_as_peft_does(tmp_path: Path) -> None:
    path, trainers = partitioned(tmp_path, "default")
    engine = spawn(EngineActor, "torch", path, "e0")
    with WeightSync(CONFIG) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        check_partitioned_versions(trainers, engine, sync.update_weights, "")
    for actor in (engine, *trainers):
        ray.kill(actor)
