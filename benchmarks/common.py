"""Shared parts of benchmarks: the environment, timing, the table and the file."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

__all__ = ["Environment", "Row", "Timing", "environment", "gpu_names", "measure", "print_table", "write_json"]

Row = Mapping[str, object]
T = TypeVar("T")

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("numpy", "torch", "ray", "vllm", "sglang", "cupy", "mooncake", "transformers", "awex")


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and when a result was measured."""

    cpu: str
    num_cores: int
    gpus: tuple[str, ...]
    python: str
    versions: dict[str, str]
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds of some calls."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def environment(packages: Sequence[str] = _PACKAGES) -> Environment:
    """Return this host, versions of the installed `packages`, the commit and the date.

    With GPUs also the driver, CUDA, NCCL (torch's) and checkpoint-engine. If the tree was copied without git
    history, the variable WEIGHTSYNC_COMMIT has the commit.
    """
    return Environment(
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        gpus=gpu_names(),
        python=platform.python_version(),
        versions=_versions(packages) | _device_versions(),
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def gpu_names() -> tuple[str, ...]:
    """Return the names of this host's GPUs without creating a CUDA context."""
    return tuple(_lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"))


def measure(call: Callable[[], T], repeats: int = 3) -> tuple[Timing, T]:
    """Return the seconds of `repeats` calls, and the result of the last call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return Timing(tuple(seconds)), result


def print_table(title: str, rows: Sequence[Row], where: Environment, notes: Sequence[str] = ()) -> None:
    """Print `rows` as a table with a column for each key, and the environment."""
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = (row.get(name, "") for name in names)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console.width = 500  # do not cut off lines in a file or a log
    console.print(table)
    hardware = f"{where.cpu}, {where.num_cores} cores, {', '.join(where.gpus) or 'no GPU'}"
    software = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    for note in (
        *notes,
        hardware,
        f"Python {where.python}, {software}",
        f"commit {where.commit}, {where.date}",
    ):
        console.print(note, highlight=False, soft_wrap=True)


def write_json(
    path: Path, name: str, rows: Sequence[Row], where: Environment, notes: Sequence[str] = ()
) -> None:
    """Write one result: the benchmark's name, command, environment, rows and problems."""
    record: dict[str, object] = {"benchmark": name, "command": shlex.join(sys.orig_argv[1:])}
    record |= {"environment": _as_dict(where)}
    record |= {"rows": [dict(row) for row in rows]} | ({"notes": list(notes)} if notes else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _as_dict(where: Environment) -> dict[str, object]:
    return {field: getattr(where, field) for field in Environment.__slots__}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """Read versions without importing, which takes a minute with vLLM and SGLang installed."""
    found = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(found[name][0]) for name in packages if name in found}


def _device_versions() -> dict[str, str]:
    drivers = _lines("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not drivers:
        return {}
    import torch

    found = {"driver": drivers[0], "CUDA": str(torch.version.cuda)}
    if torch.cuda.is_available():
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL"] = ".".join(map(str, nccl))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["checkpoint-engine"] = importlib.metadata.version("checkpoint-engine")
    return found


def _commit() -> str:
    """Return the commit, with a + if the tree has changes."""
    if given := os.environ.get("WEIGHTSYNC_COMMIT"):
        return given
    head = _lines("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
    if not head:
        return "none"
    return head[0] + ("+" if _lines("git", "-C", str(_ROOT), "status", "--porcelain") else "")


def _lines(*command: str) -> list[str]:
    """Return the lines that `command` prints; none if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
