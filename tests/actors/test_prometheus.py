"""What Prometheus would find."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fleets.local_cluster import ROOT
from tests.patience import patient


@pytest.mark.faults  # Ray exports what it was told after some ten seconds
def test_an_update_is_found_on_the_nodes_prometheus_endpoint() -> None:
    """On a cluster of its own: that of the other tests collects no metrics."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleets.exporting"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr
