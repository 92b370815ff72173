"""A LoRA adapter in an engine's slots answers as one that the engine read from files, with CUDA graphs."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.fleets.actors import until
from tests.gpu.adapter_actors import AdapterTrainer, SglangAdapters, VllmAdapters, ZeroAdapterTrainer
from tests.gpu.fleet import spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, WeightSync, WeightSyncError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(400),
]

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(60))
PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
NUM_TOKENS = 16
RANK = 16


@pytest.fixture(params=["vllm", "sglang"])
def served_by(request: pytest.FixtureRequest) -> type[EngineActor]:
    pytest.importorskip(request.param)
    return VllmAdapters if request.param == "vllm" else SglangAdapters


@pytest.mark.parametrize(("num_ranks", "autocast"), [(1, False), (1, True), (2, False)])
def test_it_answers_as_one_that_the_engine_read_from_files(
    num_ranks: int,
    autocast: bool,
    served_by: type[EngineActor],
    bundles: PlacementGroup,
    num_gpus: int,
    tmp_path: Path,
) -> None:
    if num_gpus < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path = str(tmp_path / "base")
    save_qwen3(tmp_path / "base", "untied", 0)
    trainer = spawn(AdapterTrainer, bundles, 0)
    engine = spawn_engine(served_by, bundles, range(num_ranks), path, "e0", num_ranks, RANK)
    ray.get([trainer.start.remote(path, RANK, autocast), engine.sync_layout.remote()], timeout=patient(200))
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        sync.register_adapter("math", [trainer])
        seen = set()
        for version in range(1, 5):
            ray.get([trainer.train.remote(version), trainer.save.remote(str(tmp_path / f"v{version}"))])
            report = sync.update_adapter("math")
            sys.stdout.write(f"{report} {report.seconds * 1e3:.1f} ms {dict(report.phases)}\n")
            assert report.verified
            assert report.routes == {"e0": "direct"}
            assert report.proofs == {"e0": "live weights"}
            rollout = ray.get(engine.generate.remote(PROMPTS, {**sampling, "adapter": "math"}))
            assert (rollout.adapter, rollout.adapter_version) == ("math", version)
            by_file = engine.by_file.remote(str(tmp_path / f"v{version}"), PROMPTS, NUM_TOKENS)
            assert rollout.tokens == ray.get(by_file, timeout=patient(60))
            seen.add(str(rollout.tokens))
        assert len(seen) == 4, "other weights, other answers"
        plain = ray.get(engine.generate.remote(PROMPTS, sampling))
        assert str(plain.tokens) not in seen
    ray.kill(engine)
    ray.kill(trainer)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_zero3_ranks_train_answers_as_what_vllm_read_from_files(
    num_ranks: int, bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("deepspeed")
    if num_gpus < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path, meeting = str(tmp_path / "base"), str(tmp_path / "meeting")
    save_qwen3(tmp_path / "base", "untied", 0)
    trainers = [spawn(ZeroAdapterTrainer, bundles, number) for number in range(num_ranks)]
    engine = spawn(VllmAdapters, bundles, 0, path, "e0", 1, RANK)
    joined = [each.join.remote(path, RANK, i, num_ranks, meeting) for i, each in enumerate(trainers)]
    ray.get([*joined, engine.sync_layout.remote()], timeout=patient(200))
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "adapter": "math"}
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        sync.register_adapter("math", trainers)
        for version in range(1, 4):
            folder = str(tmp_path / f"v{version}")
            ray.get([each.train.remote(version) for each in trainers], timeout=patient(60))
            ray.get([each.save.remote(folder) for each in trainers], timeout=patient(60))
            report = sync.update_adapter("math")
            sys.stdout.write(f"{report} {report.seconds * 1e3:.1f} ms {dict(report.phases)}\n")
            assert (report.routes, report.proofs) == ({"e0": "direct"}, {"e0": "live weights"})
            rollout = ray.get(engine.generate.remote(PROMPTS, sampling))
            assert rollout.adapter_version == version
            by_file = engine.by_file.remote(folder, PROMPTS, NUM_TOKENS)
            assert rollout.tokens == ray.get(by_file, timeout=patient(60))
    for actor in (engine, *trainers):
        ray.kill(actor)


def test_two_adapters_switch_together_and_one_is_unregistered(
    bundles: PlacementGroup, tmp_path: Path
) -> None:
    """Their holders share one process on the GPU."""
    pytest.importorskip("vllm")
    path = str(tmp_path / "base")
    save_qwen3(tmp_path / "base", "untied", 0)
    names = "math", "code"
    trainers = {name: spawn(AdapterTrainer, bundles, 0, share=0.2) for name in names}
    engine = spawn(VllmAdapters, bundles, 0, path, "e0", 1, RANK, max_loras=5)
    started = [trainer.start.remote(path, RANK) for trainer in trainers.values()]
    ray.get([*started, engine.sync_layout.remote()], timeout=patient(200))
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        for name, trainer in trainers.items():
            sync.register_adapter(name, [trainer])

        def check(name: str, version: int) -> None:
            folder = str(tmp_path / f"{name}-{version}")
            ray.get(trainers[name].save.remote(folder))
            sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "adapter": name}
            rollout = ray.get(engine.generate.remote(PROMPTS, sampling))
            by_file = engine.by_file.remote(folder, PROMPTS, NUM_TOKENS)
            assert rollout.adapter_version == version
            assert rollout.tokens == ray.get(by_file, timeout=patient(60))

        for version in range(2, 5):  # that of the base is 1
            ray.get([each.train.remote(10 * version + i) for i, each in enumerate(trainers.values())])
            report = sync.update_weights(version, components=[f"adapter {name}" for name in names])
            sys.stdout.write(f"{report} {report.seconds * 1e3:.1f} ms\n")
            for each in report.components.values():
                assert (each.routes, each.proofs) == ({"e0": "direct"}, {"e0": "live weights"})
            for name in names:
                check(name, version)
        sync.unregister_adapter("code")
        ray.get(trainers["math"].train.remote(99))
        assert sync.update_adapter("math").verified
        check("math", 5)
    for actor in (engine, *trainers.values()):
        ray.kill(actor)


def test_a_killed_engine_gets_it_from_holders(
    served_by: type[EngineActor], bundles: PlacementGroup, tmp_path: Path
) -> None:
    path = str(tmp_path / "base")
    save_qwen3(tmp_path / "base", "untied", 0)
    trainer = spawn(AdapterTrainer, bundles, 0)

    def start(name: str) -> Any:
        return spawn(served_by, bundles, 0, path, name, 1, RANK)

    engine = start("e0")
    ray.get([trainer.start.remote(path, RANK), engine.sync_layout.remote()], timeout=patient(200))
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "adapter": "math"}
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine}, respawn=start)
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        sync.register_adapter("math", [trainer])
        ray.get(trainer.train.remote(1))
        sync.update_adapter("math")
        before = ray.get(engine.generate.remote(PROMPTS, sampling)).tokens
        ray.get(trainer.train.remote(2))  # it has gone on, and is not asked
        os.kill(ray.get(engine.pid.remote()), signal.SIGKILL)

        def answer() -> Any:
            try:
                return ray.get(sync.engines()["e0"].generate.remote(PROMPTS, sampling), timeout=patient(30))
            except (WeightSyncError, ray.exceptions.RayError):
                return None

        assert until(lambda: answer() is not None, patient(200))
        rollout = answer()
        assert (rollout.adapter_version, rollout.tokens) == (1, before)
        assert sync.update_adapter("math").engines == {"e0": 2}
        assert answer().tokens != before
        ray.kill(sync.engines()["e0"])
    ray.kill(trainer)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_sglang_that_loses_a_rank_gets_it_from_holders(
    num_ranks: int, bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    """SGLang's ranks are processes of their own. The last one is killed, and the slots come back."""
    pytest.importorskip("sglang")
    if num_gpus < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path = str(tmp_path / "base")
    save_qwen3(tmp_path / "base", "untied", 0)
    trainer = spawn(AdapterTrainer, bundles, 0)

    def start(name: str) -> Any:
        return spawn_engine(SglangAdapters, bundles, range(num_ranks), path, name, num_ranks, RANK)

    engine = start("e0")
    ray.get([trainer.start.remote(path, RANK), engine.sync_layout.remote()], timeout=patient(200))
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "adapter": "math"}
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine}, respawn=start)
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        sync.register_adapter("math", [trainer])

        def slots() -> list[Any]:
            return ray.get(sync.engines()["e0"].slots.remote(), timeout=patient(60))

        def answer() -> Any:
            try:
                return ray.get(sync.engines()["e0"].generate.remote(PROMPTS, sampling), timeout=patient(30))
            except (WeightSyncError, ray.exceptions.RayError):
                return None

        empty = slots()
        ray.get(trainer.train.remote(1))
        sync.update_adapter("math")
        held = slots()
        filled = [{*now["slots"]} - {*then["slots"]} for now, then in zip(held, empty, strict=True)]
        assert [len(each) for each in filled] == [1] * num_ranks
        before = ray.get(engine.generate.remote(PROMPTS, sampling)).tokens
        ray.get(trainer.train.remote(2))  # it has gone on, and is not asked
        os.kill(held[-1]["pid"], signal.SIGKILL)
        assert until(lambda: len(sync.heals) == 1 and answer() is not None, patient(200))
        rollout = answer()
        assert (rollout.adapter_version, rollout.tokens) == (1, before)
        again = slots()
        assert all(each <= {*now["slots"]} for each, now in zip(filled, again, strict=True))
        assert not {each["pid"] for each in held} & {each["pid"] for each in again}
        assert sync.update_adapter("math").engines == {"e0": 2}
        assert answer().tokens != before
        ray.kill(sync.engines()["e0"])
    ray.kill(trainer)
