"""A vLLM whose ranks are on other hosts than its actor is adopted, too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).parents[2]


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_each_rank_has_a_holder_on_its_host_also_after_a_kill(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleets.far_ranks", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, tmp_path]))},
        capture_output=True,
        text=True,
        timeout=patient(380),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
