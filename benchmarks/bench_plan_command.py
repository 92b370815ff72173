"""Times `weightsync plan` of Kimi K2, from 16 trainers to 1,024.

    python -m benchmarks.bench_plan_command [--json FILE] [--limit-s 600]

Every fleet is planned in a separate process, by the command of a user, on hosts of 8 GPUs. Peak memory is the
process's largest resident set. The printed line on the engines' reads has the number of planned ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import environment, print_table, write_json

LARGE = "tp=8,dp=8,ep=64"
FLEETS = (
    ("fsdp=16", "tp=8,ep=8", 2, ""),
    ("fsdp=64", LARGE, 1, ""),
    ("fsdp=256", LARGE, 4, ""),
    ("fsdp=256", LARGE, 4, "--apart"),
    ("hsdp=4x64", LARGE, 4, ""),
    ("tp=8,ep=32,pp=8,dp=4", LARGE, 4, ""),
    ("fsdp=1024", LARGE, 16, ""),
    ("hsdp=16x64", LARGE, 16, ""),
)
"""Trainers, engine, number of engines, and another option."""


def run(trainers: str, engine: str, engines: int, option: str, limit_s: float) -> dict[str, object]:
    """Plan one fleet. If the command fails or is too slow, returns the last printed line."""
    fleet = f"--trainers {trainers} --engine {engine} --engines {engines} {option}".strip()
    command = [
        sys.executable,
        "-m",
        "weightsync.recipes.cli",
        "plan",
        "--model",
        "kimi-k2",
        *shlex.split(fleet),
    ]
    start = time.perf_counter()
    process = subprocess.Popen(
        ["timeout", f"{limit_s}", *command, "--cluster", "8xh200"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (printed.splitlines() or [""])[-1]
        return {"fleet": fleet, "wall s": seconds, "failed": f"exit code {process.returncode}: {last}"}
    reads = re.search(r"^  (?:(\d+) of )?(\d+) engine ranks read .* in (\d+) copies$", printed, re.M)
    floors = re.findall(r"^  on 8xh200: floor (.+)$", printed, re.M)
    assert reads, printed
    return {
        "fleet": fleet,
        "wall s": seconds,
        "CPU s": usage.ru_utime + usage.ru_stime,
        "peak MiB": usage.ru_maxrss / 1024,
        "ranks planned": int(reads[1] or reads[2]),
        "engine ranks": int(reads[2]),
        "copies": int(reads[3]),
        "broadcast floor": floors[0],
        "direct floor": floors[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows and where they were measured")
    parser.add_argument("--limit-s", type=float, default=600, help="the most seconds that one plan may take")
    args = parser.parse_args()
    where = environment(("numpy",))
    rows = [run(*fleet, args.limit_s) for fleet in FLEETS]
    print_table("weightsync plan, kimi-k2", rows, where, ["one run each"])
    if args.json:
        write_json(args.json, "plan-command", rows, where)


if __name__ == "__main__":
    main()
