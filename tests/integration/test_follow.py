"""What ``scripts/follow`` prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSED = {
    "update": ("sources/tensors.py", "holder/update.py", "channel/engine_end.py", "memory/digests.py"),
    "direct": ("holder/update.py", "channel/engine_end.py"),
    "refill": ("driver/refill.py", "holder/refill.py", "readers/mapped.py"),
    "connect": ("driver/connect.py", "plan/broadcast.py", "transports/gloo.py"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.faults] * (kind != "update")) for kind in PASSED]
)
def test_the_way_is_printed_by_process(kind: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.follow", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = done.stdout
    *processes, numbers = page.split("\n\n")
    heads = [each.splitlines()[0] for each in processes]
    assert heads[0] == "driver"
    assert any(head.startswith("holder") for head in heads)
    assert any(head.startswith("engine") for head in heads)
    assert all(any(f"  {file} " in each for each in processes) for file in PASSED[kind]), page
    assert re.fullmatch(r"\d+ files, \d+ changes of file, \d+ lines of functions", numbers.strip())
    files = {line.split()[0] for each in processes for line in each.splitlines()[1:]}
    assert numbers.startswith(f"{len(files)} files")
