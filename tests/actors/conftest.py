"""One Ray cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.fleets.local_cluster import forking_workers, start_ray


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    with forking_workers():
        start_ray()
        yield
        ray.shutdown()
