"""One Ray cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    root = str(Path(__file__).parents[2])
    env = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": env},
    )
    yield
    ray.shutdown()
