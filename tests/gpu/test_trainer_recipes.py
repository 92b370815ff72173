"""The recipes' loop with Megatron-Core and DeepSpeed on a GPU: what it learns, and that engines serve it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fleets.command import weightsync
from tests.unit.recipes.test_recipes_learner import MODEL, compare_one_step
from weightsync.recipes.config.recipe import ModelSpec, MoeSpec
from weightsync.recipes.training.model import build_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(420),
]
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")

MOE = MoeSpec(num_experts=4, num_experts_per_tok=2, intermediate_size=32)


@needs_megatron
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, moe=MOE)], ids=["dense", "moe"])
def test_two_ranks_on_the_gpu_learn_what_one_learns_on_the_cpu(model: ModelSpec, tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "model", model, seed=0)
    compare_one_step(tmp_path, "cuda")


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        pytest.param("megatron", (), marks=needs_megatron, id="megatron"),
        pytest.param(
            "megatron",
            ("model.moe={num_experts: 4, num_experts_per_tok: 2, intermediate_size: 128}",),
            marks=needs_megatron,
            id="megatron-moe",
        ),
        pytest.param("megatron", ("loop.sleep=2",), marks=needs_megatron, id="megatron-turns"),
        pytest.param("deepspeed", (), marks=needs_deepspeed, id="deepspeed"),
        pytest.param("deepspeed", ("loop.sleep=2",), marks=needs_deepspeed, id="deepspeed-turns"),
    ],
)
def test_the_quickstart_trains_with_it(tmp_path: Path, kind: str, overrides: tuple[str, ...]) -> None:
    one = (f"trainers.kind={kind}", "trainers.count=1", "engines.main.count=1", "engines.main.kind=torch")
    few = ("loop.steps=4", "loop.target_reward=0")
    sets = [word for each in (*one, *few, *overrides) for word in ("--set", each)]
    done = weightsync("run", "quickstart", *sets, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 engine on 1 GPU" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert all(step["verified"] for step in report["steps"])
    assert report["steps"][-1]["engines"] == {"main-0": 5}
