"""The recipes that are shipped beside the quickstart, from the outside."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.test_quickstart import weightsync
from weightsync.recipes.config.recipe import load_recipe
from weightsync.recipes.forecast.forecast import planned
from weightsync.recipes.inputs import recipe_file

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    done = weightsync("run", *arguments, "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert all(step["verified"] for step in report["steps"])
    return report


def test_engines_come_and_go_while_the_elastic_recipe_trains(tmp_path: Path) -> None:
    torch = ("--set", "engines.main.kind=torch", "--set", "engines.late.kind=torch")
    report = run(tmp_path / "run", "elastic", *torch)
    steps = report["steps"]
    assert report["status"] == "done"
    assert len(steps) == 25
    assert steps[0]["engines"] == {"main-0": 2, "main-1": 2}
    killed = next(heal for heal in report["heals"] if heal["engine"] == "main-1")
    assert killed["respawned_at"]
    assert killed["verified"]
    assert {heal["engine"] for heal in report["heals"]} == {"main-1"}
    assert steps[-1]["engines"].keys() == {"main-1", "late-0"}
    assert steps[-1]["engines"]["late-0"] == 26
    joined = next(step["step"] for step in steps if step["engines"].get("late-0"))
    assert joined > 3  # its start did not hold up the steps


def test_a_deployment_of_a_recipe_serves_a_version_whole_or_not_at_all(tmp_path: Path) -> None:
    recipe, chaos = tmp_path / "pd.yaml", tmp_path / "chaos.yaml"
    recipe.write_text(
        "name: pd\nengines:\n"
        "  prefill: {kind: torch, deployment: pd}\n"
        "  decode: {kind: torch, deployment: pd}\n"
        "sync: {bucket_bytes: 1MiB}\nloop: {steps: 3, prompts_per_step: 8}\n"
    )
    flip = "{process: engine decode-0, action: corrupt, at: move, version: 3}"
    chaos.write_text(f"faults:\n  - {flip}\n")
    steps = run(tmp_path / "run", str(recipe), "--chaos", str(chaos))["steps"]
    assert [step["rollout_versions"] for step in steps] == [[1], [2], [3]]
    assert [step["engines"] for step in steps] == [{"prefill-0": v, "decode-0": v} for v in (2, 3, 4)]
    # One engine suffices for sync.min_engines, and prefill-0 had version 3, which it did not serve alone.
    assert [bool(step["retried"]) for step in steps] == [False, True, False]
    assert "engine decode-0" in steps[1]["retried"]


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
def test_groups_of_engines_with_other_numbers_of_ranks_serve_the_same_version(tmp_path: Path) -> None:
    few = ("--set", "loop.steps=3", "--set", "loop.target_reward=0")
    report = run(tmp_path / "run", "disaggregated", *few)
    assert report["steps"][-1]["engines"] == {"wide-0": 4, "narrow-0": 4}
    assert report["heals"] == []


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2", reason="vLLM's kernel for four bits needs AVX-512"
)
@pytest.mark.parametrize(
    ("quantize", "converts"),
    [
        ("false", "it takes whole tensors, of which 14 become int4 with a scale for 1 x 32"),
        ("true", "it takes whole tensors, of which none is converted"),
    ],
)
def test_rollouts_of_int4_engines_train_the_quickstart_to_its_target(
    quantize: str, converts: str, tmp_path: Path
) -> None:
    int4 = ("--set", "engines.main.kind=vllm", "--set", "engines.main.quantization=int4")
    report = run(tmp_path / "run", "quickstart", *int4, "--set", f"trainers.quantize={quantize}")
    assert report["status"] == "done"
    assert len(report["steps"]) == 25
    assert set(report["steps"][-1]["routes"].values()) == {converts}
    assert converts in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs PEFT")
@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_rollouts_of_an_adapter_train_it_to_the_target(kind: str, tmp_path: Path) -> None:
    report = run(tmp_path / "run", "lora_grpo", "--set", f"trainers.kind={kind}")
    steps = report["steps"]
    assert report["status"] == "done"
    assert [step["rollout_versions"] for step in steps] == [[step["step"]] for step in steps]
    assert steps[-1]["engines"] == {"main-0": 26, "main-1": 26}
    served = [(row["component"], row["version"], row["proof"]) for row in report["coverage"]]
    assert served == [("model", 1, "what its loader got")] * 2 + [("adapter policy", 26, "live weights")] * 2
    assert "adapter policy" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
def test_a_draft_is_trained_and_served_with_its_model(tmp_path: Path) -> None:
    few = ["loop.steps=3", "loop.prompts_per_step=16", "engines.main.count=1", "sync.timeout_s=300"]
    report = run(tmp_path / "run", "speculative", *(part for each in few for part in ("--set", each)))
    assert [step["rollout_versions"] for step in report["steps"]] == [[1], [2], [3]]
    assert report["steps"][-1]["engines"] == {"main-0": 4}
    served = [
        (row["component"], row["version"], row["num_tensors"], row["proof"]) for row in report["coverage"]
    ]
    assert served == [("model", 4, 47, "what its loader got"), ("draft", 4, 14, "what its loader got")]
    shares = [step["acceptance"] for step in report["steps"]]
    assert all(0 <= share <= 1 for share in shares)
    assert len(set(shares)) == 3, "each step counts its own"
    assert "Accepted drafts" in (tmp_path / "run" / "report.html").read_text()
    plan = planned(load_recipe(recipe_file("speculative"), ["engines.main.count=1"]))
    assert [row["nbytes"] for row in report["coverage"]] == [row.nbytes for row in plan]


@pytest.mark.parametrize("kind", ["fsdp2", "megatron"])
def test_trainers_and_engines_take_turns(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("megatron" if kind == "megatron" else "torch")
    few = ("--set", "loop.steps=4", "--set", "loop.target_reward=0", "--set", "loop.sleep=2")
    few = (*few, "--set", f"trainers.kind={kind}")
    report = run(tmp_path / "run", "colocated_grpo", *few, "--set", "engines.main.kind=torch")
    assert report["steps"][-1]["engines"] == {"main-0": 5, "main-1": 5}
    assert [step["rollout_versions"] for step in report["steps"]] == [[1], [2], [3], [4]]
    assert report["heals"] == []


def test_trainers_and_engine_ranks_are_put_on_the_gpus_that_they_share() -> None:
    command = [sys.executable, "-m", "tests.fleets.seating"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
