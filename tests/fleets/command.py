"""The command `weightsync`, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def weightsync(
    *args: str, cwd: str | Path = "/", python: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [python, "-m", "weightsync.recipes.cli", *args],
        env=os.environ | {"PYTHONPATH": path} | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
