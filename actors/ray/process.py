"""Ends an actor's process, even if it is stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.actors.ray.placement import Placement
from weightsync.actors.servers.handle import ProcessHandle

PATIENCE_S = 15.0
"""Seconds that ending one process may take."""


def end_process(handle: ActorHandle[Any], placements: Iterable[Placement]) -> None:
    """Kill the actor. Returns when the process has ended and all memory is free.

    Ray's own kill does not end a stopped process. On a host that is gone there is nothing to end.
    """
    for node, pid in {(placement.node, placement.pid) for placement in placements}:
        end_pid(node, pid)
    ray.kill(handle)


def kill(handle: ActorHandle[Any] | ProcessHandle) -> None:
    """End a process that Ray or a server started."""
    if isinstance(handle, ProcessHandle):
        handle.kill()
    else:
        ray.kill(handle)


def ask_pid(handle: ActorHandle[Any]) -> ObjectRef[int]:
    """Ask an actor for the process id, before the actor may be stopped and not answer."""
    asked: ObjectRef[int] = handle.__ray_call__.remote(lambda _: os.getpid())
    return asked


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
    with suppress(psutil.NoSuchProcess):
        worker = psutil.Process(pid)
        if _command(worker).startswith("ray::"):  # else it is an unrelated process that has the pid now
            started = worker.children(recursive=True)
            _kill([each for each in started if "resource_tracker" not in _command(each)], deadline)
            # The worker last: Ray kills the worker's whole group 0.2 s later, and the tracker waits for the
            # children.
            _kill([worker], deadline)


def _kill(processes: Collection[psutil.Process], deadline: float) -> None:
    while (left := [each for each in processes if _is_there(each)]) and time.monotonic() < deadline:
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        time.sleep(0.02)


def _is_there(process: psutil.Process) -> bool:
    """Return True if a thread of the process still runs, and so keeps files open."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    return False


def _command(process: psutil.Process) -> str:
    """The command line of `process`, empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""
