"""Runs a part of a benchmark in a separate process, with a time limit."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import environment, print_table, write_json

__all__ = ["asked", "emit", "measure_engine", "run_part", "stage"]

_MARK = "ROW "
_STAGE = "STAGE "
_GRACE_S = 20.0


def asked() -> dict[str, Any]:
    """Return, in the part, the spec of the part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=json.loads, required=True)
    spec: dict[str, Any] = parser.parse_args().part
    return spec


def emit(row: Mapping[str, object]) -> None:
    """Send one row from the part to the parent, at once."""
    print(_MARK + json.dumps(dict(row)), flush=True)


def stage(name: str) -> None:
    """Tell the parent, from the part or its first rank, which stage begins."""
    if os.environ.get("RANK", "0") == "0":
        print(_STAGE + name, flush=True)


def run_part(
    module: str,
    spec: Mapping[str, object],
    timeout_s: float,
    num_ranks: int = 0,
    keep: Callable[[Sequence[Mapping[str, object]]], object] = lambda _: None,
) -> tuple[list[dict[str, object]], str | None]:
    """Run ``python -m module --part SPEC``. Returns the part's rows, and a problem or None.

    `keep` gets the rows so far after each one. With `num_ranks`, torchrun starts that many ranks, and one
    prints rows. Stages go to stderr, with the seconds since the start. Other output passes through.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
    command = [
        sys.executable,
        "-m",
        *(launcher if num_ranks else []),
        module,
        "--part",
        json.dumps(dict(spec)),
    ]
    root = str(Path(__file__).parent.parent)
    threads = {"OMP_NUM_THREADS": "8"} if num_ranks else {}  # like `cluster.spawn`; torchrun's default is 1
    part = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | threads,
        start_new_session=True,
    )
    started, late, last = time.monotonic(), threading.Event(), "its start"
    timer = threading.Timer(timeout_s, _end, (part, late))
    timer.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    rows = []
    assert part.stdout is not None
    try:
        for line in part.stdout:
            if line.startswith(_MARK):
                rows.append(json.loads(line.removeprefix(_MARK)))
                keep(rows)
            elif line.startswith(_STAGE):
                last = line.removeprefix(_STAGE).strip()
                print(f"{time.monotonic() - started:6.1f} s  {last}", file=sys.stderr, flush=True)
            else:
                print(line, end="", flush=True)
        status = part.wait()
    finally:
        timer.cancel()
        if part.poll() is None:
            _end(part, late)
    if late.is_set():
        return rows, f"{_label(spec)}: not done after {timeout_s:.0f} s, given up in: {last}"
    return rows, None if status == 0 else f"{_label(spec)}: ended with status {status} in: {last}"


def measure_engine(
    module: str, args: argparse.Namespace, name: str, title: str, columns: Sequence[str]
) -> None:
    """Measure ``args.engine`` in one part of `module`; print the table, and write ``args.json`` if given."""
    if importlib.util.find_spec(args.engine) is None:
        sys.exit(f"{args.engine} is not installed")
    where = environment()
    spec = {key: value for key, value in vars(args).items() if key not in ("json", "part_timeout")}

    def write(rows: Sequence[Mapping[str, object]], notes: Sequence[str] = ()) -> None:
        if args.json:
            write_json(args.json, name, rows, where, notes)

    rows, trouble = run_part(module, spec, args.part_timeout, keep=write)
    notes = [trouble] if trouble else []
    write(rows, notes)
    print_table(title, [{column: row[column] for column in columns} for row in rows], where, notes)


def _end(part: subprocess.Popen[str], late: threading.Event) -> None:
    """Terminate the part, so that it ends Ray, then kill the part's process group."""
    late.set()
    part.terminate()
    try:
        part.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGKILL)


def _label(spec: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in spec.items() if isinstance(value, str | int | float))
