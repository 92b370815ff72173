from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import weightsync
from tests.quantised import AWQ
from tests.unit.recipes.test_recipes_page import run_report
from weightsync.errors import ConfigError
from weightsync.faults import Fault, FaultPlan
from weightsync.plan import Layout
from weightsync.plan.cross_host.cross_host_parts import Needs
from weightsync.plan.cross_host.host_bundles import HostBundles
from weightsync.plan.figures.estimate import Receiver
from weightsync.recipes import cli
from weightsync.recipes.config.recipe import Recipe, load_recipe
from weightsync.recipes.forecast.engine_reads import sample
from weightsync.recipes.forecast.forecast import planned
from weightsync.recipes.forecast.quantised import INT4
from weightsync.recipes.inputs import SHIPPED, shipped_recipes
from weightsync.recipes.report.page import page
from weightsync.recipes.report.run_report import RunReport, read_report
from weightsync.text import size_text

RUNNER = CliRunner()


Call = tuple[Recipe, Path, FaultPlan | None, bool]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the command line would have run."""
    calls: list[Call] = []

    def execute(recipe: Recipe, folder: Path, chaos: FaultPlan | None, trace: bool) -> int:
        calls.append((recipe, folder, chaos, trace))
        return 0

    monkeypatch.setattr(cli, "_execute", execute)
    return calls


def test_a_shipped_recipe_runs_by_its_name(executed: list[Call]) -> None:
    result = RUNNER.invoke(cli.app, ["run", "quickstart", "--set", "loop.steps=3", "--set", "loop.seed=4"])
    assert result.exit_code == 0
    ((recipe, folder, chaos, trace),) = executed
    assert chaos is None
    assert not trace
    assert (recipe.name, recipe.loop.steps, recipe.loop.seed) == ("quickstart", 3, 4)
    assert folder == Path("runs/quickstart")


def test_a_recipe_runs_by_its_path_into_the_folder_given(executed: list[Call], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nengines: {main: {}}\n", encoding="utf-8")
    result = RUNNER.invoke(cli.app, ["run", str(path), "--out", str(tmp_path / "there")])
    assert result.exit_code == 0
    ((recipe, folder, _, _),) = executed
    assert (recipe.name, folder) == ("mine", tmp_path / "there")


def test_a_shipped_recipe_is_found_by_its_path_from_an_empty_folder(
    executed: list[Call], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RUNNER.invoke(cli.app, ["run", "recipes/quickstart.yaml"]).exit_code == 0
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/quickstart.yaml").write_text("name: mine\nengines: {main: {}}\n", encoding="utf-8")
    assert RUNNER.invoke(cli.app, ["run", "recipes/quickstart.yaml"]).exit_code == 0
    assert [recipe.name for recipe, *_ in executed] == ["quickstart", "mine"]
    assert RUNNER.invoke(cli.app, ["run", "other/quickstart.yaml"]).exit_code == 2


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_exit_code_is_what_the_run_says(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(cli, "_execute", lambda recipe, folder, chaos, trace: code)
    assert RUNNER.invoke(cli.app, ["run", "quickstart"]).exit_code == code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quikstart"], "did you mean 'quickstart'?"),
        (["chaos"], "valid: colocated_grpo, disaggregated, elastic, lora_grpo, quickstart, speculative"),
        (["quickstart", "--chaos", "quickstart"], "chaos: 'quickstart' is not valid"),
        (["quickstart", "--chaos", "no/such.yaml"], "chaos: 'no/such.yaml' is not valid"),
        (
            ["quickstart", "--chaos", "chaos", "--set", "engines.main.count=1"],
            "chaos.faults[0].process: 'engine main-1' is not valid; did you mean 'engine main-0'?",
        ),
        (["no/such.yaml"], "no/such.yaml"),
        (["quickstart", "--set", "loop.stepz=1"], "did you mean 'steps'?"),
        (["quickstart", "--set", "engines.main.count=0"], "engines.main.count: 0 is not valid"),
        (["quickstart", "--set", "engines.main.kind=sglang"], "engines.main.kind: 'sglang'"),
        (
            ["quickstart", "--set", "engines.main.tensor_parallel_size=3"],
            "engines.main.tensor_parallel_size: 3",
        ),
        (
            ["quickstart", "--set", "loop.prompts_per_step=2", "--set", "engines.main.count=3"],
            "loop.prompts_per_step: 2",
        ),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    executed: list[Call], arguments: list[str], says: str
) -> None:
    result = RUNNER.invoke(cli.app, ["run", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not executed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"action": "kil"}, "chaos.faults[0].action: 'kil' is not valid; did you mean 'kill'?"),
        ({"acton": "kill"}, "chaos.faults[0].acton: 'kill' is not valid; the key is unknown; did you mean"),
        (
            {"process": "engine mian-0"},
            "chaos.faults[0].process: 'engine mian-0' is not valid; did you mean 'engine main-0'?"
            " valid: engine main-0, engine main-1, holder 0, holder 1, trainer 0, trainer 1",
        ),
        ({"process": "holder 2"}, "chaos.faults[0].process: 'holder 2' is not valid"),
        ({"process": "main-0"}, "chaos.faults[0].process: 'main-0' is not valid; give 'engine NAME'"),
        ({"bucket": "center"}, "chaos.faults[0].bucket: 'center' is not valid"),
    ],
)
def test_a_bad_fault_plan_is_one_line_and_starts_nothing(
    executed: list[Call], tmp_path: Path, change: dict[str, str], says: str
) -> None:
    path = tmp_path / "plan.yaml"
    fault = {"process": "engine main-0", "action": "kill", "at": "move"} | change
    path.write_text(json.dumps({"faults": [fault]}), encoding="utf-8")
    result = RUNNER.invoke(cli.app, ["run", "quickstart", "--chaos", str(path)])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not executed


def test_a_fault_plan_comes_with_the_run(executed: list[Call], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("faults: [{process: trainer 1, action: hang, at: publish}]\n", encoding="utf-8")
    assert RUNNER.invoke(cli.app, ["run", "quickstart", "--chaos", str(path)]).exit_code == 0
    ((_, _, chaos, _),) = executed
    assert chaos == FaultPlan((Fault(process="trainer 1", action="hang", at="publish"),))


def test_the_shipped_fault_plan_strikes_in_the_middle_of_the_quickstart(executed: list[Call]) -> None:
    assert RUNNER.invoke(cli.app, ["run", "quickstart", "--chaos", "chaos"]).exit_code == 0
    ((recipe, folder, chaos, _),) = executed
    assert folder == Path("runs/quickstart-chaos"), "the results of the run without faults stay"
    assert chaos is not None
    assert recipe == load_recipe(SHIPPED / "quickstart.yaml")
    assert [(fault.process, fault.action, fault.at, fault.version) for fault in chaos.faults] == [
        ("engine main-1", "kill", "move", 8),
        ("engine main-0", "corrupt", "move", 14),
    ]
    assert all(1 < (fault.version or 0) <= recipe.loop.steps for fault in chaos.faults)


def test_a_trace_is_written_where_it_is_asked_for(executed: list[Call]) -> None:
    assert RUNNER.invoke(cli.app, ["run", "quickstart", "--trace"]).exit_code == 0
    assert executed[0][3]


def test_the_page_of_a_run_is_made_again(tmp_path: Path) -> None:
    run_report().write(tmp_path / "report.json")
    result = RUNNER.invoke(cli.app, ["report", str(tmp_path)])
    assert result.exit_code == 0
    assert (tmp_path / "report.html").read_text() == page(read_report(tmp_path / "report.json"))
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "quickstart: done"
    assert any("15 of 16" in line for line in lines)
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"


def test_a_report_shows_where_the_last_updates_time_went(tmp_path: Path) -> None:
    made = run_report()
    made.links = [replace(link, nbytes=20_000_000_000) for link in made.links[:1]]
    made.write(tmp_path / "report.json")
    bare = RUNNER.invoke(cli.app, ["report", str(tmp_path)]).stdout
    assert "written in 12.5 ms; beside it 36.5 ms" in _joined(bare)
    assert "floor" not in bare
    result = RUNNER.invoke(cli.app, ["report", str(tmp_path), "--cluster", "8xh200"])
    said = re.search(
        r"([█▓░]{40}) floor 8.3 ms, written in 12.5 ms; beside it 36.5 ms: publish 10.0 ms, pause 1.0 ms, "
        r"move 19.5 ms, commit 2.0 ms, verify 4.0 ms",
        _joined(result.stdout),
    )
    assert said
    assert said[1] == "█" * 7 + "▓" * 3 + "░" * 30  # 8.3, 4.2 and 36.5 of 49 ms
    html = (tmp_path / "report.html").read_text()
    assert "the least that the links of 8xh200 allow" in html
    assert "CPUs" not in result.stdout


def test_a_report_without_phases_has_no_bar(tmp_path: Path) -> None:
    made = run_report()
    made.steps = [replace(row, phases={}) for row in made.steps]
    made.write(tmp_path / "report.json")
    result = RUNNER.invoke(cli.app, ["report", str(tmp_path)])
    assert (result.exit_code, "last update" in result.stdout) == (0, False)


def test_a_report_of_a_run_on_cpus_says_that_its_floor_means_nothing(tmp_path: Path) -> None:
    made = run_report()
    made.devices = "CPUs (no GPUs here)"
    made.write(tmp_path / "report.json")
    result = RUNNER.invoke(cli.app, ["report", str(tmp_path), "--cluster", "8xh200"])
    assert "comparing it with the floors of 8xh200 means nothing" in result.stdout
    assert RUNNER.invoke(cli.app, ["report", str(tmp_path), "--cluster", "9xh200"]).exit_code == 2


def _joined(printed: str) -> str:
    """Join the lines of a printed table, without its frame."""
    return " ".join(re.sub(r"[│┌┐└┘├┤─]", " ", printed).split())


def test_a_run_that_came_to_no_step_has_a_page_too(tmp_path: Path) -> None:
    RunReport(name="early", seed=0, status="failed").write(tmp_path / "report.json")
    result = RUNNER.invoke(cli.app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stdout.splitlines()[0].strip()) == (0, "early: failed")


@pytest.mark.parametrize(
    ("folder", "text", "says"),
    [
        (
            "quikstart",
            None,
            "DIR: '{0}/quikstart' is not valid; give the folder of a run; did you mean 'quickstart'?",
        ),
        ("bad", "{", "report.json: '{0}/bad/report.json' is not valid; run the recipe again: "),
        ("bad", '{"name": "x"}', "missing required field `seed`"),
        ("bad", '{"name": "x", "seed": 0, "steps": [{"step": "1"}]}', "`$.steps[0].step`"),
        ("bad", '{"name": "x", "seed": 0, "links": [["a", "b", "near", 1]]}', "`$.links[0]`"),
    ],
)
def test_a_folder_that_is_not_a_runs_is_one_line(
    tmp_path: Path, folder: str, text: str | None, says: str
) -> None:
    RunReport(name="x", seed=0).write(tmp_path / "quickstart" / "report.json")
    if text is not None:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "report.json").write_text(text)
    result = RUNNER.invoke(cli.app, ["report", str(tmp_path / folder)])
    assert result.exit_code == 2
    assert says.format(tmp_path) in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / folder / "report.html").exists()


def test_resuming_needs_a_cluster_that_outlives_the_driver(
    executed: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    arguments = ["run", "quickstart", "--set", "resume=true"]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "resume: True is not valid" in result.stderr
    assert "ray start --head" in result.stderr
    assert not executed
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert RUNNER.invoke(cli.app, arguments).exit_code == 0
    ((recipe, _, _, _),) = executed
    assert recipe.resume


def test_the_version_is_printed() -> None:
    result = RUNNER.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"weightsync {weightsync.__version__}\n")


def test_a_shell_completes_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        asks = {
            "_WEIGHTSYNC_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        return RUNNER.invoke(cli.app, [], prog_name="weightsync", env=asks).stdout.split()

    assert completed("weightsync sch") == ["schema"]
    assert completed("weightsync plan --mo") == ["--model"]


def test_bad_input_needs_neither_ray_nor_torch() -> None:
    code = "import sys; from weightsync.recipes.cli import app\ntry: app(['run', 'none'])\n"
    code += "except SystemExit as end: print(end.code, *{'ray', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]


MODEL = ["--model", "qwen3-8b", "--trainers", "fsdp=4", "--engine", "tp=2"]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("page", "is_end"), [("docs/performance.md", False), ("docs/deltas.md", True)])
def test_the_plan_on_the_page_is_what_is_printed(page: str, is_end: bool) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = re.search(r"```sh\nweightsync (plan .+)\n```[^`]+```\n([^`]+)```", text)
    assert shown is not None
    result = RUNNER.invoke(cli.app, shlex.split(shown[1]))
    assert result.exit_code == 0
    assert result.stdout.endswith(shown[2])
    assert is_end or result.stdout == shown[2]


QWEN = ["plan", "--model", "qwen3-8b", "--trainers", "fsdp=8", "--engine", "tp=8", "--apart"]


@pytest.mark.parametrize(
    ("link", "density", "said"),
    [
        ("1gbit", "0.02", r"31\.\d times as fast"),
        ("400gbit", "0.5", "does not pay"),
        ("1gbit", "1", "does not pay"),
    ],
)
def test_a_plan_says_whether_deltas_pay_on_a_link(link: str, density: str, said: str) -> None:
    result = RUNNER.invoke(cli.app, [*QWEN, "--link", link, "--density", density])
    assert result.exit_code == 0, result.output
    section = result.stdout.partition("\ndeltas\n")[2]
    assert re.search(said, section), section
    assert re.search(r"whole +16\.4 GB", section)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "10gbit"], "--density: None"),
        (["--density", "0.1"], "--link: None"),
        (["--link", "10 GB", "--density", "0.1"], "--link: '10 GB'.*400mbit or 10gbit"),
        (["--link", "1gbit", "--density", "2"], "--density: 2.*0 to 1"),
    ],
)
def test_a_link_that_cannot_be_is_refused(options: list[str], said: str) -> None:
    result = RUNNER.invoke(cli.app, [*QWEN, *options])
    assert result.exit_code == 2
    assert re.search(said, " ".join(result.output.split())), result.output


@pytest.mark.parametrize(
    "sets", [(), ("--set", "model.moe={num_experts: 4, num_experts_per_tok: 2, intermediate_size: 64}")]
)
def test_a_recipe_that_trains_with_megatron_is_planned_as_it_is_cut(sets: tuple[str, ...]) -> None:
    result = RUNNER.invoke(cli.app, ["plan", "quickstart", "--set", "trainers.kind=megatron", *sets])
    assert result.exit_code == 0, result.output
    assert "2 trainer ranks" in result.stdout
    (roots,) = re.findall(r"2 roots send up to .* \(imbalance (.+)\)", result.stdout)
    assert float(roots) < 1.2, "one rank sends what both could"


def test_a_plan_says_what_each_engine_casts_and_quantises() -> None:
    result = RUNNER.invoke(cli.app, ["plan", "disaggregated", "--set", "engines.narrow.quantization=int4"])
    assert result.exit_code == 0, result.output
    rows = re.findall(r"^  (\S+-0) +model +25 +1\.25 MB +(\w+) +(.+)$", result.stdout, re.M)
    assert rows == [
        ("wide-0", "direct", "identity"),
        (
            "narrow-0",
            "broadcast",
            "cast: 25 tensors from float32 to bfloat16 at the engine; "
            "quantise: 14 become int4 with a scale for 1 x 32",
        ),
    ]


PLANS = re.findall(r"^weightsync (plan .+)$", (ROOT / "recipes/README.md").read_text(encoding="utf-8"), re.M)
LARGEST = "kimi-k2"


@pytest.mark.parametrize(
    "command",
    [pytest.param(plan, marks=[pytest.mark.faults] if LARGEST in plan else []) for plan in PLANS],
)
def test_plans_of_the_recipes_page_run(command: str) -> None:
    result = RUNNER.invoke(cli.app, shlex.split(command))
    assert result.exit_code == 0
    assert "\nbroadcast\n" in result.stdout
    assert "\ndirect\n" in result.stdout


@pytest.mark.parametrize("name", sorted(shipped_recipes(plans=False)))
def test_every_shipped_recipe_is_planned(name: str) -> None:
    result = RUNNER.invoke(cli.app, ["plan", name])
    assert result.exit_code == 0
    moves = {"lora_grpo": "an adapter of rank 8, 28 tensors, 131 kB", "speculative": "61 tensors"}
    assert result.stdout.startswith(f"{name}: {moves.get(name, '25 tensors')}")


def test_what_serves_is_not_told_where_limits_are_too_small() -> None:
    recipe = load_recipe(SHIPPED / "quickstart.yaml", ["sync.max_staging_bytes=4KiB"])
    with pytest.raises(ConfigError, match=r"sync\.max_staging_bytes"):
        planned(recipe)


def test_a_plan_counts_a_draft_by_itself() -> None:
    """Each of 4 layers and 1 has 11 tensors. Both models have an embedding, a norm and a head."""
    result = RUNNER.invoke(cli.app, ["plan", "speculative"])
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("  main-0, main-1")]
    layer = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128 + 2 * 128 + 2 * 32)
    ends = 4 * (2 * 64 * 128 + 128)
    assert [row[2:5] for row in rows] == [
        ["model", "47", f"{(4 * layer + ends) / 1e6:.2f}"],
        ["draft", "14", f"{(layer + ends) / 1e3:.0f}"],
    ]
    tied = RUNNER.invoke(cli.app, ["plan", "speculative", "--set", "model.tie_word_embeddings=true"])
    assert tied.stdout.startswith("speculative: 59 tensors")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "lora_grpo", "--chaos", "chaos"], "--chaos: 'chaos' is not valid; leave it out"),
        (["plan", "lora_grpo", "--cluster", "8xh200"], "--cluster: '8xh200' is not valid; leave it out"),
        (
            ["plan", "lora_grpo", "--set", "trainers.kind=megatron"],
            "give fsdp2 or plain, or leave trainers.l",
        ),
        (
            ["plan", "lora_grpo", "--set", "trainers.lora.rank=9"],
            "trainers.lora.rank: 9 is not valid; give 8,",
        ),
        (
            ["plan", "lora_grpo", "--set", "engines.main.kind=torch"],
            "give vllm or auto, or leave trainers.lora",
        ),
        (["plan", "lora_grpo", "--set", "resume=true"], "resume: True is not valid; give False, or leave"),
    ],
)
def test_what_an_adapter_cannot_have_is_refused(arguments: list[str], says: str) -> None:
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_engines_of_different_ranks_are_planned_each_for_itself() -> None:
    """1.25 MB: about a half to each rank of the first engine (norms are whole), all to the second."""
    direct = direct_section("disaggregated")
    assert "  3 engine ranks read 2.5 MB in 75 copies" in direct
    assert "  wide-0 rank 1: own GPU 0 B, own host 626 kB, other hosts 0 B; 25 copies" in direct
    assert (
        "  narrow-0 rank 0, the slowest: own GPU 0 B, own host 1.25 MB, other hosts 0 B; 25 copies" in direct
    )


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
QUANTISED = ["plan", "--model", "qwen3-30b-a3b", "--trainers", "fsdp=8", "--engine", "tp=8", "--quantization"]


def test_a_plan_says_what_a_quantised_engine_makes_of_each_group_of_tensors(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"quantization_config": FP8}))
    result = RUNNER.invoke(cli.app, [*QUANTISED, str(file)])
    assert result.exit_code == 0
    matrices = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 3 * 768 * 2048)
    scales, kept = matrices * 4 / 128**2, 2 * 151936 * 2048 + 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    direct, quantised = result.output.split("\ndirect\n")[1].split("\nquantised\n")
    assert direct.strip() == (
        "none: a quantised engine takes whole tensors, since a rank has only a part of a scale's block in "
        "model.layers.0.mlp.experts.0.gate_proj.weight"  # 768 rows by 8
    )
    assert [line.strip() for line in quantised.splitlines()] == [
        f"{2 + 48 * 5 + 1} tensors stay bfloat16: {size_text(2 * kept)}",
        f"{48 * (4 + 128 * 3)} tensors become float8_e4m3fn with a scale for 128 x 128: "
        f"{size_text(matrices)}, scales {size_text(scales)}, "
        f"in place of {size_text(2 * matrices)}",
        "each engine rank gets whole tensors by broadcast, quantised on its own device",
    ]


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        (FP8, ["--engine", "tp=2"], ""),
        (FP8, ["--model", "qwen3-30b-a3b", "--engine", "tp=8,ep=8"], ""),
        (FP8, ["--engine", "tp=2", "--apart", "--cluster", "8xh200"], "some trainers are on other hosts"),
        (FP8 | {"scale_fmt": "ue8m0"}, ["--engine", "tp=2"], "the engine's loader stores float8_e4m3fn"),
        (INT4, ["--engine", "tp=2"], "the engine's loader stores int4 with a scale for 1 x 32"),
        (FP8, ["--trainers", "fsdp=1", "--engine", "tp=1"], "the engine's holder has the trainer's memory"),
    ],
    ids=["dense", "experts", "hosts", "powers of two", "packed", "alone"],
)
def test_a_plan_says_whether_ranks_of_a_quantised_engine_read_just_what_they_keep(
    config: dict[str, object], arguments: list[str], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"quantization_config": config}))
    command = ["plan", "--model", "qwen3-8b", "--trainers", "fsdp=8", *arguments]
    quantised = RUNNER.invoke(cli.app, [*command, "--quantization", str(file)]).output
    (said,) = [line for line in quantised.splitlines() if line.startswith("  engine-0  model")]
    assert ("direct" in said) == (not says)
    direct = quantised.split("\ndirect\n")[1].split("\n\n")[0]
    if says:
        assert f"none: a quantised engine takes whole tensors, since {says}" in direct
        assert "  each engine rank gets whole tensors by broadcast" in quantised
        return
    last = "  quantised engines read directly from the second update on: the first one shows where bytes go"
    plain = RUNNER.invoke(cli.app, command).output
    assert direct == plain.split("\ndirect\n")[1].rstrip("\n") + f"\n{last}"
    assert "  each engine rank's holder reads what the rank keeps" in quantised


def test_a_plan_says_of_nvfp4_that_no_engine_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    file.write_text(json.dumps({"quantization_config": config}))
    result = RUNNER.invoke(cli.app, [*QUANTISED, str(file)])
    matrices = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 3 * 768 * 2048)
    assert (
        f"become float4_e2m1fn with a scale for 1 x 16, and one for all: {size_text(matrices / 2)}, "
        f"scales {size_text(matrices / 16)}"
    ) in result.output
    assert "no engine has been shown to take this format: connect() refuses it" in result.output


@pytest.mark.parametrize(
    ("model", "last"),
    [
        ("qwen3-8b", "each engine rank gets whole tensors by broadcast"),
        ("qwen3-30b-a3b", "no engine has been shown to take experts of it: connect() refuses it"),
    ],
)
def test_a_plan_says_what_awq_makes_of_a_model(model: str, last: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"quantization_config": AWQ}))
    command = ["plan", "--model", model, "--trainers", "fsdp=8", "--engine", "tp=2", "--quantization"]
    output = RUNNER.invoke(cli.app, [*command, str(file)]).output
    assert "tensors become int4 (AWQ) with a scale and a zero point for 1 x 32: " in output
    assert last in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "give a model's config.json"),
        ("{", "neither JSON nor YAML"),
        ("model_type: qwen3", "it has no quantization_config"),
        ("quantization_config: {quant_method: gguf}", "valid: awq, compressed-tensors, fp8, gptq"),
        ("[" * 10**5, "neither JSON nor YAML"),
        ("quantization_config: {quant_method: fp8, weight_block_size: 5}", "as the config.json of a quant"),
        (
            "quantization_config: {quant_method: fp8, weight_block_size: [1, 1], ignored_layers: 5}",
            "as the config.json of a quantised",
        ),
        (
            "quantization_config: {quant_method: fp8, weight_block_size: [1, 1], ignored_layers: ['re:(']}",
            "missing ), unterminated",
        ),
        (
            "quantization_config: {quant_method: compressed-tensors, config_groups: [1]}",
            "as the config.json of a quantised model has it",
        ),
        (
            "quantization_config: {quant_method: compressed-tensors, config_groups: {all: null}}",
            "as the config.json of a quantised model has it",
        ),
    ],
)
def test_a_file_without_a_known_format_is_one_line(text: str | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    result = RUNNER.invoke(cli.app, [*QUANTISED, str(file)])
    assert result.exit_code == 2
    assert problem in " ".join(result.output.split())


def test_a_plan_between_hosts_says_what_crosses() -> None:
    """16.38 GB on 8 trainers of one host and 2 engines of 4 on the next: all of it crosses once."""
    arguments = ["plan", "--model", "qwen3-8b", "--trainers", "fsdp=8", "--engine", "tp=4", "--engines", "2"]
    result = RUNNER.invoke(cli.app, [*arguments, "--apart", "--cluster", "8xh100", "--offloaded"])
    assert result.exit_code == 0
    assert "8 trainer ranks, 2 engines of 4 ranks, on 16 GPUs in 2 hosts\n" in result.stdout
    assert "floor 36.4 ms; broadcast 36.4 ms, host to device 32.0 ms" in result.stdout
    assert "between 2 hosts: floor 41.0 ms; 16.4 GB into one of them, 16.4 GB out of one" in result.stdout


def test_a_host_with_trainers_of_its_own_takes_only_what_it_lacks() -> None:
    arguments = ["plan", "--model", "qwen3-8b", "--trainers", "fsdp=16", "--engine", "tp=8", "--engines", "2"]
    result = RUNNER.invoke(cli.app, [*arguments, "--cluster", "8xh100"])
    assert "between 2 hosts: floor 20.5 ms; 8.19 GB into one of them, 8.19 GB out of one" in result.stdout


def direct_section(*arguments: str) -> list[str]:
    result = RUNNER.invoke(cli.app, ["plan", *arguments])
    assert result.exit_code == 0
    return result.stdout.partition("\ndirect\n")[2].splitlines()


def test_direct_reads_of_two_engine_ranks_apart_take_half_the_model_each() -> None:
    """61.06 GB over two NVLinks of 382 GB/s."""
    arguments = ["--model", "qwen3-30b-a3b", "--trainers", "fsdp=2", "--engine", "tp=2", "--apart"]
    lines = direct_section(*arguments, "--cluster", "4xh200")
    assert "  all: own GPU 0 B, own host 61.1 GB, other hosts 0 B" in lines
    assert lines[-1] == "  on 4xh200: floor 80.0 ms; NVLink into GPU 2"


def test_what_engines_of_a_host_read_alike_from_another_crosses_once() -> None:
    arguments = [
        "--model",
        "qwen3-8b",
        "--trainers",
        "fsdp=8",
        "--engine",
        "tp=4",
        "--engines",
        "2",
        "--apart",
    ]
    lines = direct_section(*arguments, "--cluster", "8xh100")
    assert lines[0].startswith("  8 engine ranks read 32.8 GB in ")
    assert lines[1] == "  all: own GPU 0 B, own host 16.4 GB, other hosts 16.4 GB"
    assert lines[-1] == "  on 8xh100: floor 41.0 ms; NICs into host 1"


def test_of_very_many_copies_only_some_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.recipes.forecast.engine_reads.MOST_COPIES", 5_000)
    arguments = ["--model", "qwen3-8b", "--trainers", "fsdp=4", "--engine", "tp=8", "--cluster", "8xh100"]
    lines = direct_section(*arguments)
    assert lines[0].startswith("  3 of 8 engine ranks")
    assert "floor at least " in lines[-2]


@pytest.mark.parametrize("cluster", [[], ["--cluster", "8xh100"]])
@pytest.mark.parametrize("apart", [[], ["--apart"]])
@pytest.mark.parametrize(("trainers", "tp", "engines"), [(4, 2, 7), (12, 4, 9), (3, 8, 5)])
def test_ranks_that_are_alike_are_planned_once(
    monkeypatch: pytest.MonkeyPatch,
    cluster: list[str],
    apart: list[str],
    trainers: int,
    tp: int,
    engines: int,
) -> None:
    arguments = ["--model", "qwen3-8b", "--trainers", f"fsdp={trainers}", "--engine", f"tp={tp}"]
    arguments += ["--engines", str(engines), *apart, *cluster]
    planned: list[str] = []
    of_host = Receiver.of_host

    def counted(
        ranks: Sequence[tuple[str, int, Needs]],
        gpus: Sequence[int],
        per_host: int,
        bundles: HostBundles | None = None,
    ) -> list[Receiver]:
        planned.extend(name for name, _, _ in ranks)
        return of_host(ranks, gpus, per_host, bundles)

    monkeypatch.setattr(Receiver, "of_host", counted)
    quick, num_quick = direct_section(*arguments), len(planned)
    monkeypatch.setattr(
        "weightsync.recipes.forecast.engine_reads.alike",
        lambda every, *_: dict.fromkeys(range(len(every)), 1),
    )
    assert quick == direct_section(*arguments)
    assert num_quick <= len(planned) - num_quick == tp * engines


@pytest.mark.faults
def test_a_hundred_thousand_engines_are_planned_at_once() -> None:
    arguments = ["plan", *MODEL, "--engines", "100000", "--cluster", "8xh200"]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert "100000 engines of 2 ranks, on 200000 GPUs in 25000 hosts" in result.stdout
    assert "  200000 engine ranks read 1.64 PB in " in result.stdout


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ((5, 7, 4), [0, 1, 2, 3, 4]),
        ((9, 3, 4), [0, 1, 2]),
        ((16, 9, 4), [0, 1, 2, 3, 8, 9, 10, 11]),
        ((14, 12, 4), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    ],
)
def test_whole_hosts_are_planned(sizes: tuple[int, int, int], ranks: list[int]) -> None:
    assert sample(*sizes) == ranks


def test_tensors_that_bytes_alone_cannot_bring_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_dtype_tensors(
        source: Layout, name: str, engine: Layout
    ) -> tuple[frozenset[str], dict[str, str]]:
        rest = [each for each in source.names if each.endswith("layernorm.weight")]
        return frozenset(source.names) - {*rest}, dict.fromkeys(rest, "float32 here, bfloat16 there")

    monkeypatch.setattr("weightsync.recipes.forecast.forecast.same_dtype_tensors", same_dtype_tensors)
    lines = direct_section(*MODEL)
    assert "  model.layers.0.input_layernorm.weight, by broadcast: float32 here, bfloat16 there" in lines
    assert lines[-1].endswith(" more tensors by broadcast")


def test_trainers_in_host_memory_are_not_read_directly() -> None:
    lines = direct_section(*MODEL, "--offloaded")
    assert lines == ["  none: the trainers publish into host memory, which engines do not read"]


def test_a_recipe_whose_trainers_sleep_says_so_itself() -> None:
    assert direct_section("quickstart", "--set", "loop.sleep=2") == direct_section(*MODEL, "--offloaded")


def test_the_plan_of_a_recipe_moves_what_its_run_moves() -> None:
    result = RUNNER.invoke(cli.app, ["plan", "quickstart", "--set", "placement=disaggregated"])
    assert result.exit_code == 0
    assert "2 trainer ranks, 2 engines of 1 rank, on 4 GPUs\n" in result.stdout
    assert "2 holders receive up to 1.25 MB" in result.stdout
    assert "floor" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--model: None is not valid; give RECIPE, or --model, --trainers and --engine"),
        (MODEL[:4], "--engine: None is not valid"),
        (["quikstart"], "did you mean 'quickstart'?"),
        (["quickstart", *MODEL[:2]], "--model: 'qwen3-8b' is not valid; RECIPE says it"),
        (["quickstart", "--engines", "2"], "--engines: 2 is not valid; RECIPE says it"),
        (["quickstart", "--apart"], "--apart: True is not valid; RECIPE says it"),
        (["quickstart", "--set", "sync.max_staging_bytes=4KiB"], "sync.max_staging_bytes: "),
        ([*MODEL, "--set", "trainers.count=1"], "--set: ['trainers.count=1'] is not valid"),
        ([*MODEL, "--engines", "0"], "--engines: 0 is not valid; give at least 1"),
        (
            [*MODEL, "--engines", "500001"],
            "--engines: 500001 is not valid; give at most 500000: engines of 2",
        ),
        ([*MODEL, "--cluster", "8xh2000"], "did you mean '8xh200'?"),
        ([*MODEL, "--cluster", "no/such.yaml"], "--cluster: 'no/such.yaml' is not valid"),
        (["--model", "qwen3-30b-a33b", *MODEL[2:]], "did you mean 'qwen3-30b-a3b'?"),
        ([*MODEL[:2], "--trainers", "fsdq=4", *MODEL[4:]], "did you mean 'fsdp'?"),
        ([*MODEL[:4], "--engine", "tp=6"], "--engine tp: 6 is not valid; the 32 attention heads"),
        (["a" * 300], "give a YAML file or a shipped name"),
        (["--model", "a" * 300, *MODEL[2:]], "give a YAML file or a shipped name"),
        ([*MODEL, "--quantization", "a" * 300], "give a model's config.json"),
    ],
)
def test_a_bad_plan_is_one_line(arguments: list[str], says: str) -> None:
    result = RUNNER.invoke(cli.app, ["plan", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_plan_needs_neither_ray_nor_torch() -> None:
    code = f"import sys; from weightsync.recipes.cli import app\ntry: app(['plan', *{MODEL!r}])\n"
    code += "except SystemExit as end: print(end.code, *{'ray', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"


def test_checkpoints_that_cannot_be_served_start_nothing(tmp_path: Path) -> None:
    for name in ("a", "b/a", "cut", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a", "b/a", "cut"):
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"weight": torch.zeros(4)}, tmp_path / name / "model.safetensors")
    os.truncate(tmp_path / "cut/model.safetensors", 40)
    (tmp_path / "twice").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "a" / name, tmp_path / "twice")
    shutil.copy(tmp_path / "a/model.safetensors", tmp_path / "twice/other.safetensors")
    cases = {
        "a config.json and safetensors files": [tmp_path / "empty"],
        "it is truncated": [tmp_path / "cut"],
        "weight: ": [tmp_path / "twice"],
        "another one is called a: rename one": [tmp_path / "a", tmp_path / "b/a"],
        "--kind: 'tensorrt'": [tmp_path / "a", "--kind", "tensorrt"],
        "a torch engine has one rank": [tmp_path / "a", "--kind", "torch", "--tensor-parallel-size", "2"],
    }
    for message, arguments in cases.items():
        done = RUNNER.invoke(cli.app, ["serve-checkpoint", *map(str, arguments)])
        assert (done.exit_code, message in done.stderr) == (cli.BAD_INPUT, True), done.stderr
