"""What ``scripts/follow`` prints."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from multiprocessing.connection import Connection

import pytest

from tests import follow
from tests.forked import said_by

PASSED = {
    "update": (
        "sources/tensors.py",
        "holder/update.py",
        "channel/feed.py",
        "memory/kernels/digests.py",
    ),
    "direct": ("holder/update.py", "channel/feed.py"),
    "refill": ("driver/updating/refill.py", "holder/refill.py", "readers/mapped.py"),
    "connect": ("driver/connecting/connect.py", "plan/broadcast/broadcast.py", "transports/gloo.py"),
}


def follow_in_this_process(pipe: Connection, kind: str) -> None:
    sys.argv, page = ["follow", kind], io.StringIO()
    with contextlib.redirect_stdout(page):
        follow.main()
    pipe.send(page.getvalue())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.faults] * (kind != "update")) for kind in PASSED]
)
def test_the_way_is_printed_by_process(kind: str) -> None:
    page = said_by(follow_in_this_process, kind)
    *processes, numbers = page.split("\n\n")
    heads = [each.splitlines()[0] for each in processes]
    assert heads[0] == "driver"
    assert any(head.startswith("holder") for head in heads)
    assert any(head.startswith("engine") for head in heads)
    assert all(any(f"  {file} " in each for each in processes) for file in PASSED[kind]), page
    assert re.fullmatch(r"\d+ files, \d+ changes of file, \d+ lines of functions", numbers.strip())
    files = {line.split()[0] for each in processes for line in each.splitlines()[1:]}
    assert numbers.startswith(f"{len(files)} files")
