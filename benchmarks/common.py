"""What every benchmark shares: the record of where it ran, timing, the table and the file."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

__all__ = ["Environment", "Row", "Timing", "environment", "measure", "print_table", "write_json"]

Row = Mapping[str, object]
T = TypeVar("T")

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("numpy", "torch", "ray", "vllm", "sglang", "cupy", "mooncake")


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and when a result was measured: a figure without it is worth nothing."""

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
    """This host, the versions of those `packages` that can be imported, the commit and the date."""
    return Environment(
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        gpus=tuple(_lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")),
        python=platform.python_version(),
        versions={name: version for name in packages if (version := _version(name))},
        commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def measure(call: Callable[[], T], repeats: int = 3) -> tuple[Timing, T]:
    """Seconds of `repeats` calls, and what the last one returned."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return Timing(tuple(seconds)), result


def print_table(title: str, rows: Sequence[Row], where: Environment, notes: Sequence[str] = ()) -> None:
    """Prints `rows`, which share their keys, as a table, and where they were measured."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a log cuts nothing off
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


def write_json(path: Path, name: str, rows: Sequence[Row], where: Environment) -> None:
    """Writes one result: the benchmark's name, its environment and its rows."""
    record = {"benchmark": name, "environment": _as_dict(where), "rows": [dict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _as_dict(where: Environment) -> dict[str, object]:
    return {field: getattr(where, field) for field in Environment.__slots__}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except (ImportError, AttributeError):
        return None


def _commit() -> str:
    """The commit, with a + if the tree differs from it."""
    head = _lines("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
    if not head:
        return "none"
    return head[0] + ("+" if _lines("git", "-C", str(_ROOT), "status", "--porcelain") else "")


def _lines(*command: str) -> list[str]:
    """What `command` prints; nothing if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
