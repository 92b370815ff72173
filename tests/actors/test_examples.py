"""The examples, a loop that is not ours, and benchmarks for GPUs, run without one as a user runs them."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.fleets.local_cluster import TOO_LATE
from tests.patience import patient
from weightsync import TrainerShard
from weightsync.recipes.config.recipe import ModelSpec
from weightsync.recipes.training.model import build_checkpoint

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
ALLOWED = {*sys.stdlib_module_names, "ray", "torch", "transformers", "weightsync"}
UPDATE = re.compile(r"version (\d+)(?: \((\w+)\))?: \d+ kB to 2 of 2 engines in .* verified")
ANSWER = re.compile(r"  (e\d) serves (?:version )?(\w+): 1, 2, 3 -> \[([\d, ]+)\]")
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
needs_no_gpu_or_four = pytest.mark.skipif(
    0 < torch.cuda.device_count() < 4, reason="four GPUs, or none, are needed"
)


def printed_by(name: str) -> str:
    """What `python examples/name` writes to its standard output, in a Ray cluster of its own.

    It is run again where the machine is too busy for Ray's own deadline.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    command = [sys.executable, f"examples/{name}"]
    deadline = time.monotonic() + patient(60)
    while True:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if TOO_LATE not in done.stderr or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answers(printed: str) -> dict[str, list[str]]:
    """The tokens of each version or checkpoint, from one engine after the other."""
    found: dict[str, list[str]] = {}
    for _, served, tokens in ANSWER.findall(printed):
        found.setdefault(served, []).append(tokens)
    return found


def check_that_both_learn_to_count(printed: str) -> None:
    assert [version for version, _ in UPDATE.findall(printed)] == list("12345")
    said = answers(printed)
    assert list(said) == list("12345")
    assert all(first == second for first, second in said.values())
    assert said["5"][0] == "4, 5, 6, 7, 8"


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_a_plain_module_is_served_by_two_engines() -> None:
    check_that_both_learn_to_count(printed_by("plain_module_cpu.py"))


@pytest.mark.faults
@pytest.mark.timeout(400)
@needs_vllm
@needs_no_gpu_or_four
def test_fsdp2_ranks_are_served_by_two_vllms() -> None:
    check_that_both_learn_to_count(printed_by("fsdp2_two_vllm.py"))


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_checkpoints_are_served_without_a_trainer() -> None:
    printed = printed_by("serve_checkpoints.py")
    assert UPDATE.findall(printed) == [("1", "base"), ("2", "tuned"), ("3", "base"), ("4", "tuned")]
    said = answers(printed)
    assert {name: len(tokens) for name, tokens in said.items()} == {"base": 4, "tuned": 4}
    assert all(len(set(tokens)) == 1 for tokens in said.values())
    assert said["base"] != said["tuned"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_uses_the_public_names_alone(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {
        module
        for node in imports
        for module in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert {module.split(".")[0] for module in modules} <= ALLOWED
    assert not {module for module in modules if module.startswith("weightsync.")}


def test_the_page_of_the_examples_lists_each_of_them() -> None:
    listed = re.findall(r"^\| \[`(\w+\.py)`\]", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]


LOOP = ROOT / "recipes/loops/openrlhf_loop.py"
MAX_CHANGED = 10


def before() -> str:
    """The loop with its own broadcast."""
    kept = [line for line in LOOP.read_text().splitlines(keepends=True) if not line.endswith("  # +\n")]
    return re.sub(r"^( *)# - ", r"\1", "".join(kept), flags=re.MULTILINE)


def after() -> str:
    """The loop as it stands, without the notes on what stood there."""
    kept = [line for line in LOOP.read_text().splitlines(keepends=True) if not re.match(r" *# - ", line)]
    return re.sub(r"  # \+$", "", "".join(kept), flags=re.MULTILINE)


def changed() -> list[str]:
    lines = difflib.unified_diff(before().splitlines(), after().splitlines(), n=0, lineterm="")
    return [line for line in lines if re.match(r"[-+](?![-+]{2} )", line)]


def test_plugging_in_changes_at_most_ten_lines() -> None:
    added = [line for line in changed() if line[0] == "+"]
    assert len(added) <= MAX_CHANGED
    assert any("update_weights" in line for line in added)
    assert "broadcast_to_vllm.remote" in "".join(line for line in changed() if line[0] == "-")
    assert len(LOOP.read_text().splitlines()) <= 155


def test_the_guide_shows_these_lines() -> None:
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
    assert [line for line in shown.splitlines() if line[:1] in "+-" and line] == changed()


def test_a_trainer_need_not_call_our_constructor() -> None:
    class Trainer(TrainerShard):
        def __init__(self) -> None:
            self.model = nn.Linear(2, 3)

    assert [meta.name for meta in Trainer().sync_layout().rank_layout().tensors] == ["weight", "bias"]


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
@pytest.mark.parametrize("text", [before(), after()], ids=["broadcast", "weightsync"])
def test_the_engines_end_equal_to_the_trainers(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ModelSpec(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    model = build_checkpoint(tmp_path / "model", spec, seed=1)
    loop = ModuleType("users_own")  # what is not imported reaches Ray's workers as it is here
    exec(compile(text, "users_own", "exec"), loop.__dict__)
    *trained, first, second = loop.run(str(model))
    assert first == second == trained[0] == trained[1]
    assert len({tuple(tokens) for tokens in first}) > 8
    if "WeightSync" in text:
        printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version")]
        assert len(printed) == 3
        assert all(" verified" in line and "failed" not in line for line in printed)


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_updates_of_a_fleet_without_gpus_are_measured_and_right(tmp_path: Path) -> None:
    asked = [
        "--gpu",
        "--cpu",
        "--source",
        "device",
        "--model",
        "tiny",
        "--world",
        "2",
        "--rounds",
        "1",
        "--join",
    ]
    rows, stages = measured("bench_sync", *asked, out=tmp_path / "sync.json")
    assert len(rows) == 1
    assert all(row["last report"]["verified"] for row in rows)
    assert "s  connecting\n" in stages
    assert all(row["join s"] > 0 for row in rows)


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_tokens_are_counted_while_updates_are_staged(tmp_path: Path) -> None:
    asked = ["--cpu", "--engine", "torch", "--model", "tiny", "--rounds", "1", "--clients", "2"]
    (row,), _ = measured("bench_staged", *asked, out=tmp_path / "staged.json")
    assert row["last report"]["verified"]
    assert row["last report"]["phases"]["stage"] > 0
    assert min(row["tokens/s"], row["tokens/s arriving"]) > 0


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_what_a_commit_computes_again_is_counted(tmp_path: Path) -> None:
    asked = ["--requests", "2", "--prompt", "128", "--rounds", "1", "--hidden", "128", "--layers", "2"]
    (drop, salt), _ = measured("bench_caches", *asked, out=tmp_path / "caches.json")
    assert (drop["prefix_cache"], salt["prefix_cache"]) == ("drop", "salt")
    assert drop["computed"] > 2 * 128
    assert salt["computed"] == 2


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("awex") is None, reason="awex is not installed")
def test_awex_and_ours_bring_the_same_uneven_shards(tmp_path: Path) -> None:
    asked = ["--only", "awex", "--cpu", "--ranks", "3:1", "--rounds", "1"]
    (ours, theirs), _ = measured("bench_peers", *asked, out=tmp_path / "peers.json")
    assert (ours["system"], theirs["system"]) == ("ours", "awex")
    assert ours["shards"] == theirs["shards"] == "uneven"
    assert ours["GB"] == theirs["GB"]


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["torch", "vllm", "sglang"])
def test_the_layers_of_an_engines_updates_are_measured_and_its_weights_right(
    tmp_path: Path, engine: str
) -> None:
    """Without GPUs, only SGLang has a way of its own."""
    if not importlib.util.find_spec(engine):
        pytest.skip(f"{engine} is not installed")
    asked = ["--cpu", "--engine", engine, "--model", "tiny", "--rounds", "1", "--each-rounds", "1"]
    asked += ["--part-timeout", str(patient(350)), "--bucket-mib", "0"]
    found, _ = measured("bench_latency", *asked, out=tmp_path / "latency.json")
    rows = {row["way"]: row for row in found}
    own = ["per-tensor", "per-tensor, one by one", "bucketed"] if engine == "sglang" else []
    assert list(rows) == [*own, "direct"]
    assert rows["direct"]["last report"]["verified"]
    for name in own:
        row = rows[name]
        parts = ("metadata", "open", "load", "way", "cache", "rest")
        assert sum(row[f"{part} ms"] for part in (*parts, *(["pack"] if name == "bucketed" else []))) == (
            pytest.approx(row["total ms"])
        )
        assert row["calls"] == (1 if name == "per-tensor" else 25)


@pytest.mark.faults
def test_readmes_loop_is_measured_with_its_settings(tmp_path: Path) -> None:
    asked = ["--cpu", "--engine", "torch", "--model", "tiny", "--way", "loop", "--rounds", "2"]
    (row,), _ = measured("bench_latency", *asked, out=tmp_path / "loop.json")
    assert row["way"] == "loop"
    assert row["last report"]["verified"]


def measured(module: str, *asked: str, out: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what went to stderr."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *asked, "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patient(390), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(out.read_text())
    assert "notes" not in record, record["notes"]
    return record["rows"], done.stderr
