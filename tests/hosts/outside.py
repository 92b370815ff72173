"""What a scenario asks of the machine around its hosts, and of Ray on them."""

from __future__ import annotations

import sys
from typing import Any

import ray


def say(*words: object, sep: str = " ") -> None:
    """Write a line, at once."""
    sys.stdout.write(sep.join(map(str, words)) + "\n")
    sys.stdout.flush()


def ask(*words: object) -> int:
    """Have the outside do something. Returns its answer."""
    say("ASK", *words)
    return int(sys.stdin.readline())


def put(host: str, cls: type, *args: object) -> Any:
    """Start an actor on a host."""
    return ray.remote(cls).options(num_cpus=0, resources={host: 1}).remote(*args)
