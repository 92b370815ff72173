from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes import cli
from recipes.recipe import Recipe, load_recipe
from weightsync.faults import Fault, FaultPlan

RUNNER = CliRunner()


Call = tuple[Recipe, Path, FaultPlan | None]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the command line would have run."""
    calls: list[Call] = []

    def execute(recipe: Recipe, folder: Path, chaos: FaultPlan | None) -> int:
        calls.append((recipe, folder, chaos))
        return 0

    monkeypatch.setattr(cli, "_execute", execute)
    return calls


def test_a_shipped_recipe_runs_by_its_name(executed: list[Call]) -> None:
    result = RUNNER.invoke(cli.app, ["run", "quickstart", "--set", "loop.steps=3", "--set", "loop.seed=4"])
    assert result.exit_code == 0
    ((recipe, folder, chaos),) = executed
    assert chaos is None
    assert (recipe.name, recipe.loop.steps, recipe.loop.seed) == ("quickstart", 3, 4)
    assert folder == Path("runs/quickstart")


def test_a_recipe_runs_by_its_path_into_the_folder_given(executed: list[Call], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nengines: {main: {}}\n", encoding="utf-8")
    result = RUNNER.invoke(cli.app, ["run", str(path), "--out", str(tmp_path / "there")])
    assert result.exit_code == 0
    ((recipe, folder, _),) = executed
    assert (recipe.name, folder) == ("mine", tmp_path / "there")


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_exit_code_is_what_the_run_says(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(cli, "_execute", lambda recipe, folder, chaos: code)
    assert RUNNER.invoke(cli.app, ["run", "quickstart"]).exit_code == code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quikstart"], "did you mean 'quickstart'?"),
        (["chaos"], "valid: quickstart"),
        (["quickstart", "--chaos", "quickstart"], "chaos: 'quickstart' is not valid"),
        (["quickstart", "--chaos", "no/such.yaml"], "chaos: 'no/such.yaml' is not valid"),
        (
            ["quickstart", "--chaos", "chaos", "--set", "engines.main.count=1"],
            "chaos.faults[0].who: 'engine main-1' is not valid; did you mean 'engine main-0'?",
        ),
        (["no/such.yaml"], "no/such.yaml"),
        (["quickstart", "--set", "loop.stepz=1"], "did you mean 'steps'?"),
        (["quickstart", "--set", "engines.main.count=0"], "engines.main.count: 0 is not valid"),
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
            {"who": "engine mian-0"},
            "chaos.faults[0].who: 'engine mian-0' is not valid; did you mean 'engine main-0'?"
            " valid: engine main-0, engine main-1, holder 0, holder 1, trainer 0, trainer 1",
        ),
        ({"who": "holder 2"}, "chaos.faults[0].who: 'holder 2' is not valid"),
        ({"who": "main-0"}, "chaos.faults[0].who: 'main-0' is not valid; give 'engine NAME'"),
        ({"bucket": "center"}, "chaos.faults[0].bucket: 'center' is not valid"),
    ],
)
def test_a_bad_fault_plan_is_one_line_and_starts_nothing(
    executed: list[Call], tmp_path: Path, change: dict[str, str], says: str
) -> None:
    path = tmp_path / "plan.yaml"
    fault = {"who": "engine main-0", "action": "kill", "at": "move"} | change
    path.write_text(json.dumps({"faults": [fault]}), encoding="utf-8")
    result = RUNNER.invoke(cli.app, ["run", "quickstart", "--chaos", str(path)])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not executed


def test_a_fault_plan_comes_with_the_run(executed: list[Call], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("faults: [{who: trainer 1, action: hang, at: publish}]\n", encoding="utf-8")
    assert RUNNER.invoke(cli.app, ["run", "quickstart", "--chaos", str(path)]).exit_code == 0
    ((_, _, chaos),) = executed
    assert chaos == FaultPlan((Fault(who="trainer 1", action="hang", at="publish"),))


def test_the_shipped_fault_plan_strikes_in_the_middle_of_the_quickstart(executed: list[Call]) -> None:
    assert RUNNER.invoke(cli.app, ["run", "quickstart", "--chaos", "chaos"]).exit_code == 0
    ((recipe, _, chaos),) = executed
    assert chaos is not None
    assert recipe == load_recipe(cli.SHIPPED / "quickstart.yaml")
    assert [(fault.who, fault.action, fault.at, fault.version) for fault in chaos.faults] == [
        ("engine main-1", "kill", "move", 8),
        ("engine main-0", "corrupt", "move", 14),
    ]
    assert all(1 < (fault.version or 0) <= recipe.loop.steps for fault in chaos.faults)


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
    ((recipe, _, _),) = executed
    assert recipe.resume


def test_bad_input_needs_neither_ray_nor_torch() -> None:
    code = "import sys; from recipes.cli import app\ntry: app(['run', 'none'])\n"
    code += "except SystemExit as end: print(end.code, *{'ray', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
