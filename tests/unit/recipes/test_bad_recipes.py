"""What a recipe can get wrong: each file of tests/bad_recipes says in its first line what a run answers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightsync.recipes import cli, inputs

FOLDER = Path(__file__).parents[2] / "bad_recipes"
FILES = sorted(FOLDER.glob("*.yaml"))
RUNNER = CliRunner()
ANSWER = re.compile(r"\d+: [^:]+: .+ is not valid; .{3,}")


def answer(*arguments: str) -> str:
    """The one line that bad input is answered with."""
    result = RUNNER.invoke(cli.app, [*arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cli, "with_cluster")


@pytest.fixture(scope="module")
def answers() -> dict[Path, str]:
    """The line that answers each bad recipe, from one process, which loads neither Ray nor torch."""
    code = """
import sys
from weightsync.recipes import cli
del cli.with_cluster
for path in sys.argv[1:]:
    try: cli.app(["run", path])
    except SystemExit as end: assert end.code == 2
print(*{"ray", "torch", "transformers"} & set(sys.modules))
"""
    command = [sys.executable, "-c", code, *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    return dict(zip(FILES, done.stderr.splitlines(), strict=True))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_bad_recipe_is_answered_with_line_field_value_and_remedy(
    path: Path, answers: dict[Path, str]
) -> None:
    wanted = path.read_bytes().partition(b"\n")[0].decode().removeprefix("# ")
    assert ANSWER.fullmatch(wanted)
    assert answers[path].startswith(f"weightsync: {path}:{wanted}")


@pytest.mark.parametrize("command", ["bench", "plan"])
def test_commands_read_recipes_alike(command: str) -> None:
    for path in FILES[::20]:
        assert answer(command, str(path)) == answer("run", str(path))


def test_there_are_many_and_each_is_wrong_in_a_way_of_its_own() -> None:
    firsts = {path.read_bytes().partition(b"\n")[0] for path in FILES}
    assert len(firsts) == len(FILES) >= 40


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["loop.steps=many"], "--set loop.steps=many: loop.steps: 'many' is not valid; give a whole number"),
        (
            ["sync.bucket_bytes=1"],
            "--set sync.bucket_bytes=1: sync.bucket_bytes: 1 is not valid; give at least",
        ),
        (["model.moe={num_experts: 0}"], "--set model.moe={num_experts: 0}: model.moe.num_experts"),
        (
            ["trainers.count=3"],
            "--set trainers.count=3: loop.prompts_per_step: 128 is not valid; give a mult",
        ),
        (["loop.stepz=1"], "--set: 'loop.stepz' is not valid; 'stepz' is unknown; did you mean 'steps'?"),
        (
            ["engines.main.count=200", "loop.seed=1"],
            "--set engines.main.count=200 --set loop.seed=1: loop.prompts_per_step: 128 is not valid; give",
        ),
        (["loop.steps"], "--set: 'loop.steps' is not valid; give key=value"),
        (["loop.steps=[1"], "loop.steps: '[1' is not valid; give a YAML value"),
        (
            ["loop.steps=2", "loop.epochs=0"],
            "--set loop.epochs=0: loop.epochs: 0 is not valid; give at least 1",
        ),
    ],
)
def test_a_bad_override_is_named(given: list[str], says: str) -> None:
    sets = [part for one in given for part in ("--set", one)]
    assert answer("run", "quickstart", *sets).startswith(f"weightsync: {says}")


def test_a_bad_fault_plan_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    kill = "{process: engine main-0, action: kill, at: move}"
    for line, field in (
        ("  - {process: engine main-0, action: kil, at: move}", "chaos.faults[1].action: 'kil'"),
        ("  - {process: engine mian-0, action: kill, at: move}", "chaos.faults[1].process: 'engine mian-0'"),
    ):
        path.write_text(f"faults:\n  - {kill}\n{line}\n", encoding="utf-8")
        says = answer("run", "quickstart", "--chaos", str(path))
        assert says.startswith(f"weightsync: {path}:3: {field} is not valid; did you mean")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("head_dim: 0", "{path}:7: model.head_dim: 0 is not valid; give at least 1"),
        ("head_dym: 64", "{path}:7: --model.head_dym: 64 is not valid; the key is unknown; did you mean"),
        ("vocab_size: 64", "{path}:7: vocab_size: '64' is not valid; line 4 has it already"),
    ],
)
def test_a_bad_model_is_named_by_its_line(tmp_path: Path, change: str, says: str) -> None:
    path = tmp_path / "model.yaml"
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_key_value_heads")
    lines = [f"{name}: 64" for name in sizes]
    path.write_text("\n".join([*lines, "intermediate_size: 64", change]), encoding="utf-8")
    given = ("plan", "--model", str(path), "--trainers", "fsdp=1", "--engine", "tp=1")
    assert answer(*given).startswith(f"weightsync: {says.format(path=path)}")


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "deep.yaml").write_text("name: " + "[" * 3000)
    (tmp_path / "loop.yaml").write_text("name: &a [*a]\nengines: {}")
    (tmp_path / "folder.yaml").mkdir()
    for name, says in (
        ("missing", "recipe: '{path}' is not valid; give a YAML file; No such file or directory"),
        ("folder", "recipe: '{path}' is not valid; give a YAML file; Is a directory"),
        ("empty", "{path}:1: top level: None is not valid; give a mapping of names to values"),
        ("deep", "{path}:1: recipe: "),
        ("loop", "{path}:1: name: "),
    ):
        path = tmp_path / f"{name}.yaml"
        assert answer("run", str(path)).startswith(f"weightsync: {says.format(path=path)}")


def test_where_only_transformers_serves_an_engine_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        inputs, "choose_engine", lambda kind, field: ("torch", "auto: transformers is installed")
    )
    says = "weightsync: engines.main.tensor_parallel_size: 2 is not valid; install vllm"
    assert answer("run", "quickstart", "--set", "engines.main.tensor_parallel_size=2").startswith(says)
