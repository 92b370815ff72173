"""Ends an actor's process, even if it is stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.actors.placement import Placement
from weightsync.engines.rank_process import process_stat

__all__ = ["PATIENCE_S", "end_pid", "end_process"]

PATIENCE_S = 15.0
"""Seconds that ending one process may take."""


def end_process(handle: ActorHandle[Any], placements: Iterable[Placement]) -> None:
    """Kill the actor. Returns when its process has ended and its memory is free.

    Ray's own kill does not end a stopped process. On a host that is gone there is nothing to end.
    """
    for node, pid in {(placement.node, placement.pid) for placement in placements}:
        end_pid(node, pid)
    ray.kill(handle)


def end_pid(node: str, pid: int) -> None:
    """End worker `pid` on host `node` and the processes that it started.

    Returns when all have ended.

    Multiprocessing's resource tracker is spared: after the others it unlinks the shared memory that they
    named, and ends. Ray's own kill ends it at once, which leaves the memory of vLLM's ranks in /dev/shm.
    """
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    ended = ray.remote(num_cpus=0, max_retries=0)(_end).options(scheduling_strategy=here).remote(pid)
    try:
        ray.get(ended, timeout=PATIENCE_S)
    except RayError:
        ray.cancel(ended, force=True)


def _end(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    if _command(pid).startswith(b"ray::"):  # else it has ended, and an unrelated process may have its pid
        _kill([each for each in _started_by(pid) if b"resource_tracker" not in _command(each)], deadline)
        # The worker last: Ray kills its whole group 0.2 s later, and the tracker waits for the children.
        _kill([pid], deadline)


def _kill(pids: Collection[int], deadline: float) -> None:
    while (left := [each for each in pids if _is_there(each)]) and time.monotonic() < deadline:
        for each in left:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)


def _is_there(pid: int) -> bool:
    """Whether a thread of the process still runs, and so holds its files open."""
    stat = process_stat(pid)
    return stat.state not in "XZ" or stat.num_threads > 1


def _command(pid: int) -> bytes:
    """The command line of `pid`, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _started_by(pid: int) -> Iterator[int]:
    """All descendants of `pid`."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            for child in map(int, children.read_text().split()):
                yield child
                yield from _started_by(child)
