"""Credentials, an address that leads nowhere, and that the caller's environment comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient
from weightsync.recipes.cluster import _credentials, _keep_logs, environment, existing_cluster


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_each_cluster_has_a_secret_of_its_own() -> None:
    first, second = _credentials(), _credentials()
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_a_users_own_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert _credentials() == {}


def test_a_ray_that_read_its_credentials_already_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", os)
    assert _credentials() == {}


def test_a_cluster_that_is_there_is_taken_with_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    assert existing_cluster() == ""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert existing_cluster() == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert existing_cluster() == "10.0.0.1:6379"
    assert _credentials() == {}


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECIPES_TEST_A", "before")
    monkeypatch.delenv("RECIPES_TEST_B", raising=False)
    context = environment({"RECIPES_TEST_A": "x", "RECIPES_TEST_B": "y"})
    context.__enter__()
    assert (os.environ["RECIPES_TEST_A"], os.environ["RECIPES_TEST_B"]) == ("x", "y")
    swallowed = context.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert not swallowed
    assert os.environ["RECIPES_TEST_A"] == "before"
    assert "RECIPES_TEST_B" not in os.environ


def test_a_cluster_that_cannot_be_reached_is_bad_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightsync.recipes.cli", "run", "quickstart", "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "RAY_ADDRESS": ":6399"},
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("weightsync: RAY_ADDRESS: ':6399' is not valid; give auto")


def test_logs_are_kept_under_the_names_of_their_actors(tmp_path: Path) -> None:
    session = tmp_path / "session"
    session.mkdir()
    head = ":job_id:01000000\n:actor_name:GrpoTrainer\n"
    for name, text in {
        "worker-ab12-01000000-41.out": head + ":actor_name:EngineActor main-0\nhello\n",
        "worker-ab12-01000000-41.err": head + "oops\n",
        "worker-ab13-01000000-42.err": "without a name\n",
        "worker-ab14-01000000-43.err": "",
        "worker-ab15-02000000-44.err": head,
    }.items():
        (session / name).write_text(text)
    _keep_logs(session, "01000000", tmp_path / "logs")
    kept = sorted(each.name for each in (tmp_path / "logs").iterdir())
    assert kept == ["EngineActor-main-0-41.out", "GrpoTrainer-41.err", "worker-ab13-01000000-42.err"]
