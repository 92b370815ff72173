"""A part of a benchmark in a process of its own, so that a hang costs its time limit and no more."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["asked", "emit", "run_part", "stage"]

_MARK = "ROW "
_STAGE = "STAGE "
_GRACE_S = 20.0


def asked() -> dict[str, Any]:
    """In the part: what it was started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=json.loads, required=True)
    spec: dict[str, Any] = parser.parse_args().part
    return spec


def emit(row: Mapping[str, object]) -> None:
    """In the part: hand one row to the parent, at once."""
    print(_MARK + json.dumps(dict(row)), flush=True)


def stage(name: str) -> None:
    """In the part (of ranks, the first): say what begins, so that the parent knows how far it came."""
    if os.environ.get("RANK", "0") == "0":
        print(_STAGE + name, flush=True)


def run_part(
    module: str, spec: Mapping[str, object], timeout_s: float, num_ranks: int = 0
) -> tuple[list[dict[str, object]], str | None]:
    """``python -m module --part SPEC``: its rows so far, and what went wrong, if anything did.

    With `num_ranks`, torchrun starts so many of it, of which one prints rows. Stages go to stderr, with the
    seconds since the start; what else it prints passes through.
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
    threads = {"OMP_NUM_THREADS": "8"} if num_ranks else {}  # as `cluster.spawn`; torchrun would take 1
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


def _end(part: subprocess.Popen[str], late: threading.Event) -> None:
    """Ask first, so that it can end its Ray; then end its process group."""
    late.set()
    part.terminate()
    try:
        part.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGKILL)


def _label(spec: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in spec.items() if isinstance(value, str | int | float))
