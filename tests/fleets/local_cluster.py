"""A Ray cluster of this process's own, started again where the machine is too busy for Ray's own deadline."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import ray

from tests.fleets import zygote, zygote_client
from tests.patience import patient

TOO_LATE = "timed out during startup"
"""Ray gives its raylet 30 s, which no setting changes."""
ROOT = Path(__file__).parents[2]
FORKING_PYTHON = "WEIGHTSYNC_TEST_FORKING_PYTHON"
_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    # The first ones wait for the zygote. Ray would give up on them, and the driver wait for them forever.
    "RAY_worker_register_timeout_seconds": f"{patient(60):.0f}",
}
_SCRIPT = """#!/bin/sh
case "$1" in
*/default_worker.py | */setup_worker.py | -m) exec {python} -I -S {client} {socket} "$@" ;;
esac
case "$2" in
*/dashboard/agent.py) exec {python} "$@" --minimal ;;
esac
exec {python} "$@"
"""
"""Stands for Python where Ray starts processes. A node's agent is a minimal one: it collects no metrics."""
_UNUSED = ("start_api_server", "start_log_monitor", "start_monitor")
"""What a node starts for dashboards, terminals and autoscalers. It would take seconds of a core to start."""


def start_ray() -> None:
    """Start Ray with two CPUs; its actors find this checkout, and are forked where there is a zygote."""
    with starting_workers():
        _start(time.monotonic() + patient(60))


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Have nodes that start now start workers that find this checkout, forked where there is a zygote.

    What they need is in this process's environment, which its workers inherit: a runtime environment would
    start each of them through a second process.
    """
    unused = dict.fromkeys(_UNUSED, mock.DEFAULT)
    with (
        mock.patch.dict(os.environ, _ENVIRONMENT),
        mock.patch.object(sys, "executable", forking_python()),
        mock.patch.multiple("ray._private.node.Node", **unused),
    ):
        yield


def forking_python() -> str:
    """Return what stands for Python: ``-m MODULE`` runs in a fork of the zygote, if there is one."""
    return os.environ.get(FORKING_PYTHON, sys.executable)


@contextlib.contextmanager
def forking_workers() -> Iterator[None]:
    """Have Ray's workers forked, also those of clusters that this process's children start."""
    with tempfile.TemporaryDirectory() as folder:
        path, script = f"{folder}/zygote", Path(folder, "python")
        parts = {"python": sys.executable, "client": zygote_client.__file__, "socket": path}
        script.write_text(_SCRIPT.format(**{name: shlex.quote(part) for name, part in parts.items()}))
        script.chmod(0o755)
        with subprocess.Popen(
            [sys.executable, "-m", zygote.__name__, path],
            cwd=ROOT,
            env=os.environ | _ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            with mock.patch.dict(os.environ, {FORKING_PYTHON: str(script)}):
                yield


def _start(deadline: float) -> None:
    # Processes that Ray gave up on would warn wherever they are collected.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        while not _starts(deadline):
            ray.shutdown()
            gc.collect()


def _starts(deadline: float) -> bool:
    """Whether Ray came in its own time; any other failure is raised, and this one too after `deadline`."""
    before = {*psutil.Process().children()}
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:
        if TOO_LATE not in str(error) or time.monotonic() > deadline:
            raise
        for left in {*psutil.Process().children()} - before:  # Ray forgets them
            left.kill()
        return False
    return True
