"""`weightsync run` with the quickstart and other recipes, and `weightsync bench`, from the outside."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.fleets.command import weightsync
from tests.fleets.local_cluster import forking_python
from weightsync.recipes.config.recipe import load_recipe
from weightsync.recipes.forecast.forecast import planned
from weightsync.recipes.inputs import recipe_file

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "is_started",
    [
        pytest.param(True, id="its own cluster", marks=pytest.mark.faults),
        pytest.param(False, id="one that runs"),
    ],
)
def test_a_short_run_does_its_work_and_reports_it(tmp_path: Path, is_started: bool) -> None:
    started = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "python": forking_python()}
    joined = {} if is_started else started
    small = ["engines.main.kind=torch", "loop.steps=2", "loop.prompts_per_step=4", "loop.target_reward=0"]
    sets = [part for setting in small for part in ("--set", setting)]
    done = weightsync("run", "quickstart", *sets, "--trace", "--out", str(tmp_path / "run"), **joined)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = "start Ray: " if is_started else "join the Ray cluster: "
    assert done.stdout.startswith(ours), "no library speaks first"
    assert "step 2/2" in done.stdout
    assert "2 of 2" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [step["version"] for step in report["steps"]] == [2, 3]
    assert [step["rollout_versions"] for step in report["steps"]] == [[1], [2]]
    assert all(0 <= step["mismatch_kl"] <= step["mismatch"] < 1e-5 for step in report["steps"])
    assert all(step["verified"] and step["bytes"] > 1e6 for step in report["steps"])
    assert report["steps"][-1]["engines"] == {"main-0": 3, "main-1": 3}
    assert report["heals"] == []
    assert done.stdout.count("engine          component  tensors") == 2  # first version, and the end
    assert re.search(r"main-0, main-1  model +25 +1\.25 MB  broadcast  (load|identity) +3 ", done.stdout)
    assert f"start 2 trainers and 2 engines on {report['devices']}:" in done.stdout
    assert {"seed", "host", "packages", "name"} <= set(report)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    logs = {each.name.rpartition("-")[0] for each in (tmp_path / "run" / "logs").iterdir()}
    assert {"EngineActor-main-0", "EngineActor-main-1", "GrpoTrainer-0", "holder-0"} <= logs
    assert {link["distance"] for link in report["links"]} == {"same GPU or slot", "same host"}
    assert sum(link["nbytes"] for link in report["links"]) >= 2 * report["steps"][-1]["bytes"]
    assert "2 of 2" in (tmp_path / "run" / "report.html").read_text()
    holds_the_spans_of_three_updates(json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"])


def holds_the_spans_of_three_updates(events: list[dict[str, Any]]) -> None:
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == [
        "driver",
        *(f"engine main-{i} rank 0" for i in (0, 1)),
        *(f"holder {i}" for i in (0, 1)),
        *(f"trainer {i}" for i in (0, 1)),
    ]
    for version in (1, 2, 3):
        spans = {
            (tracks[e["pid"], e["tid"]], e["name"]): (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and e["args"]["version"] == version
        }
        # On one host all clocks are one: what a rank does lies inside the driver's phase.
        for (name, what), (begin, end) in spans.items():
            phase = "publish" if what == "publish" else "move"
            if name != "driver":
                assert spans["driver", phase][0] - 1000 <= begin < end <= spans["driver", phase][1] + 1000
        assert {what for name, what in spans if name == "engine main-1 rank 0"} == {"load", "verify"}


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = weightsync("run", "quickstart", "--out", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert "--out: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_reward_reaches_its_mark_and_the_report_tells_of_every_heal(tmp_path: Path) -> None:
    settings = ("--set", "engines.main.kind=torch", "--out", str(tmp_path / "run"))
    done = weightsync("run", "quickstart", "--chaos", "chaos", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["status"] == "done"
    assert all(step["verified"] for step in report["steps"])
    assert report["steps"][-1]["engines"] == {"main-0": 26, "main-1": 26}
    killed = next(heal for heal in report["heals"] if heal["engine"] == "main-1")
    flipped = next(heal for heal in report["heals"] if heal["engine"] == "main-0")
    assert killed["died_at"] < killed["respawned_at"] < killed["serving_at"] < killed["died_at"] + 60
    assert "is gone" in killed["cause"]
    assert flipped["respawned_at"] is None
    assert "wrong bytes" in flipped["cause"]
    for heal in (killed, flipped):
        assert heal["verified"]
        assert heal["bytes_from"].keys() == heal["ways"].keys() == {"holder 0", "holder 1"}
        assert heal["gb_per_s"] > 0


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    done = weightsync("run", *arguments, "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert all(step["verified"] for step in report["steps"])
    return report


@pytest.mark.faults
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


@pytest.mark.faults
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


@pytest.mark.faults
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
def test_groups_of_engines_with_other_numbers_of_ranks_serve_the_same_version(tmp_path: Path) -> None:
    few = ("--set", "loop.steps=3", "--set", "loop.target_reward=0")
    report = run(tmp_path / "run", "disaggregated", *few)
    assert report["steps"][-1]["engines"] == {"wide-0": 4, "narrow-0": 4}
    assert report["heals"] == []


@pytest.mark.faults
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


@pytest.mark.faults
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


@pytest.mark.faults
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


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["fsdp2", "megatron"])
def test_trainers_and_engines_take_turns(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("megatron" if kind == "megatron" else "torch")
    few = ("--set", "loop.steps=4", "--set", "loop.target_reward=0", "--set", "loop.sleep=2")
    few = (*few, "--set", f"trainers.kind={kind}")
    report = run(tmp_path / "run", "colocated_grpo", *few, "--set", "engines.main.kind=torch")
    assert report["steps"][-1]["engines"] == {"main-0": 5, "main-1": 5}
    assert [step["rollout_versions"] for step in report["steps"]] == [[1], [2], [3], [4]]
    assert report["heals"] == []


@pytest.mark.faults
def test_trainers_and_engine_ranks_are_put_on_the_gpus_that_they_share() -> None:
    command = [sys.executable, "-m", "tests.fleets.seating"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.faults
def test_the_updates_of_a_small_fleet_are_measured(tmp_path: Path) -> None:
    small = ["engines.main.kind=torch", "engines.main.count=1", "trainers.count=1"]
    sets = [part for setting in small for part in ("--set", setting)]
    out = tmp_path / "bench.json"
    asked = ["--updates", "3", "--cluster", "4xh200", "--json", str(out), "--out", str(tmp_path / "run")]
    done = weightsync("bench", "quickstart", *sets, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quickstart: 3 updates of 1.25 MB, all verified, on " in done.stdout
    assert "start 1 trainer and 1 engine on CPUs (no GPUs here" in done.stdout
    assert "floors are those of 4xh200" in done.stdout
    assert "this fleet ran on CPUs: comparing it with the floors of 4xh200 means nothing" in done.stdout
    made = json.loads(out.read_text())
    rows = {(row["process"], row["what"]): row for row in made["rows"]}
    assert {("trainer 0", "publish"), ("holder 0", "move"), ("driver", "update")} <= set(rows)
    load = rows["engine main-0 rank 0", "load"]
    assert load["nbytes"] == made["nbytes"]
    assert 0 < load["floor_s"] < load["least"] <= load["median"] <= load["most"]
    assert rows["driver", "update"]["median"] > rows["driver", "move"]["median"] > load["median"]


@pytest.mark.faults
def test_a_fleet_that_takes_turns_does_so_in_a_bench(tmp_path: Path) -> None:
    small = ["engines.main.kind=torch", "engines.main.count=1", "trainers.count=1", "loop.sleep=1"]
    sets = [part for setting in small for part in ("--set", setting)]
    done = weightsync(
        "bench", "quickstart", *sets, "--updates", "2", "--json", "/dev/full", "--out", str(tmp_path / "run")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == "weightsync: could not write /dev/full: No space left on device\n"
    assert "quickstart: 2 updates of 1.25 MB, all verified" in done.stdout


@pytest.mark.faults
def test_an_update_that_fails_fails_the_bench(tmp_path: Path) -> None:
    late = ["engines.main.kind=torch", "engines.main.count=1", "trainers.count=1", "sync.timeout_s=0.001"]
    sets = [part for setting in late for part in ("--set", setting)]
    done = weightsync("bench", "quickstart", *sets, "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "no answer within 0.001 s" in done.stderr
    assert len(done.stderr.splitlines()) == 1
