"""What README and the pages show, run one after another as a reader would."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from tests.fleets.actors import spawn
from tests.models import build_tiny_qwen3, greedy
from tests.pages import run_block
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, WeightSync
from weightsync.recipes.config.recipe import ModelSpec
from weightsync.recipes.training.model import build_checkpoint

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]
with_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(120), heartbeat_s=patient(1))


def loop(folder: Path, kind: str) -> dict[str, Any]:
    """Run README's loop on a small model."""
    path = folder / "model"
    build_checkpoint(path, ModelSpec(), seed=0)
    here = {'"/models/qwen3-0.6b"': repr(str(path)), "timeout_s=60": f"timeout_s={patient(60)}"}
    return run_block("README.md", 0, {}, here | {'"auto"': repr(kind)})


@pytest.mark.faults
def test_the_loop_of_the_readme_with_the_engine_that_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = loop(tmp_path, "auto")
    assert "version 10: 1.25 MB to 2 of 2 engines" in capsys.readouterr().out
    assert names["rollout"].version == 10
    end(names)


def test_the_loop_of_the_readme_and_what_other_pages_do_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = loop(tmp_path, "torch")
    assert "version 10: 1.25 MB to 2 of 2 engines" in capsys.readouterr().out
    assert (names["rollout"].version, len(names["rollout"].tokens[0])) == (10, 16)

    path = names["path"]
    names["start_engine"] = lambda name: spawn(EngineActor, "torch", path, name)
    end({"engines": names["engines"]})  # they serve version 10, and these pages begin at 1
    names["engines"] = {name: names["start_engine"](name) for name in names["engines"]}
    with WeightSync(CONFIG) as names["sync"]:
        names["sync"].register_trainers(names["trainers"])
        names = run_block("docs/faults.md", 0, names)
        names["sync"].connect()
        names = run_block("docs/performance.md", 0, names)
        names = run_block("docs/performance.md", 1, names)
        names = run_block("docs/performance.md", 2, names)
        shown = capsys.readouterr().out
        assert re.search(r"engine e1 rank 0 (load|wait|verify)", shown)
        assert "on 4xh200: floor" in shown
        assert re.search(r"engine e1 rank 0: 1\.25 MB, floor \d+ µs, took", shown)

        run_block("docs/faults.md", 1, names)
        for version in range(4, 9):
            names["sync"].update_weights(version)
        names["sync"].settle(patient(200))
        assert [heal.engine for heal in names["sync"].heals] == ["e1"]
        names["engines"] = names["sync"].engines()
    end(names)


def test_engines_that_start_from_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [tmp_path / name for name in ("base", "tuned")]
    wanted = [greedy(build_tiny_qwen3(path, seed=i), [[1, 2, 3]], 16) for i, path in enumerate(models)]
    actor = ray.remote(EngineActor).options(
        num_cpus=0, name="weightsync/serve-checkpoint/e0", namespace="weightsync"
    )
    engine = actor.remote("torch", str(models[0]), "e0")
    names = {"WeightSync": WeightSync, "engines": {"e0": engine}, "ray": ray}
    here = {f"models/{path.name}": str(path) for path in models}
    names = run_block("docs/checkpoints.md", 0, names, here)
    said = capsys.readouterr().out
    assert "version 1 (base): " in said
    assert "version 2 (tuned): " in said
    names = run_block("docs/checkpoints.md", 1, names)
    assert len(names["tokens"][0]) == 16
    asked = engine.generate.remote([[1, 2, 3]], {"max_tokens": 16, "temperature": 0.0})
    assert ray.get(asked).tokens == wanted[1] != wanted[0]
    names["sync"].close()
    end(names)


def test_an_engine_and_a_source_of_ones_own_are_updated_and_verified(tmp_path: Path) -> None:
    from tests.fleets.registered import Elsewhere, array_trainer

    trainer = spawn(array_trainer())
    names = {"ray": ray, "EngineActor": Elsewhere, "path": str(tmp_path)}
    engine = run_block("docs/extending.md", 1, names)["engine"]
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        for version in (1, 2):
            weight = np.random.default_rng(version).integers(-9, 9, (4, 6))
            ray.get(trainer.write.remote(weight))
            report = sync.update_weights(version)
            assert (report.verified, report.proofs) == (True, {"e0": "live weights"})
            rollout = ray.get(engine.generate.remote([[1, 2]], {}))
            assert (rollout.tokens, rollout.version) == ([[int(weight.sum()) * 3]], version)
    assert ray.get(engine.info.remote()) == {"kind": "my_engines:SumEngine", "why": "asked for by its class"}
    end({"engines": {"e0": engine}, "trainers": [trainer]})


@with_vllm
@pytest.mark.faults
def test_two_sharded_ranks_and_an_engine_of_two_without_gpus(tmp_path: Path) -> None:
    """As README's code for GPUs, but for the devices, and the place where ranks meet."""
    path = str(tmp_path / "model")
    build_checkpoint(path, ModelSpec(), seed=0)
    from transformers import AutoModelForCausalLM

    from weightsync import TrainerShard

    names = {"ray": ray, "TrainerShard": TrainerShard, "EngineActor": EngineActor, "path": path}
    names["AutoModelForCausalLM"] = AutoModelForCausalLM
    without_gpus = {'"nccl"': '"gloo"', ".cuda()": "", "num_gpus=1": "num_cpus=0", "num_gpus=2": "num_cpus=0"}
    without_gpus |= {"tcp://127.0.0.1:29500": f"file://{tmp_path / 'meeting'}"}
    without_gpus['"gpu_memory_utilization": 0.8'] = '"max_model_len": 64'
    names = run_block("docs/guide.md", 6, names, without_gpus)
    with WeightSync(CONFIG) as sync:
        sync.register_trainers(names["trainers"])
        sync.register_engines(names["engines"])
        sync.connect()
        assert sync.update_weights(1).verified
    end(names)


def end(names: Mapping[str, Any]) -> None:
    for actor in (*names["engines"].values(), *names.get("trainers", ())):
        ray.kill(actor)
