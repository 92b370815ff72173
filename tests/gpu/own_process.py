"""Runs a module of the tests in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.patience import patient

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Fails with the end of what it wrote. `env`: further environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
