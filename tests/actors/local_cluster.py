"""A Ray cluster of this process's own, started again where the machine is too busy for Ray's own deadline."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest import mock

import ray

from tests.patience import patient

TOO_LATE = "timed out during startup"
"""Ray gives its raylet 30 s, which no setting changes."""


def start_ray() -> None:
    """Start Ray with two CPUs; its actors find this checkout.

    What they need is in this process's environment, which its workers inherit: a runtime environment would
    start each of them through a second process.
    """
    path = str(Path(__file__).parents[2])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        _start(time.monotonic() + patient(60))


def _start(deadline: float) -> None:
    while True:
        try:
            ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
            return
        except Exception as error:
            if TOO_LATE not in str(error) or time.monotonic() > deadline:
                raise
            ray.shutdown()
