"""The loop of the quickstart, where it ends early."""

from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from weightsync.errors import StateError
from weightsync.recipes.config.recipe import load_recipe
from weightsync.recipes.inputs import SHIPPED
from weightsync.recipes.loops import quickstart
from weightsync.recipes.report.run_folder import RunFolder
from weightsync.recipes.report.run_report import read_report
from weightsync.recipes.report.screen import Screen


def test_the_files_of_a_run_that_fails_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quickstart, "Launcher", MagicMock())
    monkeypatch.setattr(quickstart, "WeightSync", lambda *_, **__: MagicMock(heals=[]))
    monkeypatch.setattr(quickstart, "find_actors", MagicMock(side_effect=StateError("trainer 0 is gone")))
    with pytest.raises(StateError):
        quickstart.run(
            load_recipe(SHIPPED / "quickstart.yaml"), RunFolder(tmp_path), Screen(Console(file=io.StringIO()))
        )
    report = read_report(tmp_path / "report.json")
    assert (report.status, report.error) == ("failed", "trainer 0 is gone")
    assert "trainer 0 is gone" in (tmp_path / "report.html").read_text()
