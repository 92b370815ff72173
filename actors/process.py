"""Ending an actor's process for certain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.seat import Seat

__all__ = ["end_pid", "end_process"]

_PATIENCE_S = 15.0


def end_process(handle: ActorHandle[Any], seats: Iterable[Seat]) -> None:
    """Kill the actor, and return once its process is gone from its seats' host, with the memory it held.

    Ray's own kill does not end a process that is stopped. A host that is gone has no such process.
    """
    ray.kill(handle)
    for node, pid in {(seat.node, seat.pid) for seat in seats}:
        end_pid(node, pid)


def end_pid(node: str, pid: int) -> None:
    """End the worker `pid` of host `node`, and return once it is gone."""
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    ended = ray.remote(num_cpus=0, max_retries=0)(_end).options(scheduling_strategy=here).remote(pid)
    try:
        ray.get(ended, timeout=_PATIENCE_S)
    except RayError:
        ray.cancel(ended, force=True)


def _end(pid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while _is_worker(pid) and time.monotonic() < deadline:
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_worker(pid: int) -> bool:
    """Not an unrelated process that has got the number since."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False
