from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes import cli
from recipes.recipe import Recipe

RUNNER = CliRunner()


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, Path]]:
    """What the command line would have run."""
    calls: list[tuple[Recipe, Path]] = []

    def execute(recipe: Recipe, folder: Path) -> int:
        calls.append((recipe, folder))
        return 0

    monkeypatch.setattr(cli, "_execute", execute)
    return calls


def test_a_shipped_recipe_runs_by_its_name(executed: list[tuple[Recipe, Path]]) -> None:
    result = RUNNER.invoke(cli.app, ["run", "quickstart", "--set", "loop.steps=3", "--set", "loop.seed=4"])
    assert result.exit_code == 0
    ((recipe, folder),) = executed
    assert (recipe.name, recipe.loop.steps, recipe.loop.seed) == ("quickstart", 3, 4)
    assert folder == Path("runs/quickstart")


def test_a_recipe_runs_by_its_path_into_the_folder_given(
    executed: list[tuple[Recipe, Path]], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nengines: {main: {}}\n", encoding="utf-8")
    result = RUNNER.invoke(cli.app, ["run", str(path), "--out", str(tmp_path / "there")])
    assert result.exit_code == 0
    ((recipe, folder),) = executed
    assert (recipe.name, folder) == ("mine", tmp_path / "there")


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_exit_code_is_what_the_run_says(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(cli, "_execute", lambda recipe, folder: code)
    assert RUNNER.invoke(cli.app, ["run", "quickstart"]).exit_code == code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quikstart"], "did you mean 'quickstart'?"),
        (["no/such.yaml"], "no/such.yaml"),
        (["quickstart", "--set", "loop.stepz=1"], "did you mean 'steps'?"),
        (["quickstart", "--set", "engines.main.count=0"], "engines.main.count: 0 is not valid"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    executed: list[tuple[Recipe, Path]], arguments: list[str], says: str
) -> None:
    result = RUNNER.invoke(cli.app, ["run", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not executed


def test_bad_input_needs_neither_ray_nor_torch() -> None:
    code = "import sys; from recipes.cli import app\ntry: app(['run', 'none'])\n"
    code += "except SystemExit as end: print(end.code, *{'ray', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
