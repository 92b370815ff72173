"""A folder for sockets that nobody else on the host may open."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["PrivateDirectory"]


class PrivateDirectory:
    """A directory of mode 0700 that goes with this process, also when that is killed."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="weightsync-"))
        # The shell outlives us by a moment: its standard input ends when we do. It is nobody's child,
        # since children of a Ray worker may be ended with it.
        script = 'exec 3<&0; (read -r _ <&3; rm -rf "$1") >/dev/null 2>&1 &'
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._janitor.wait()

    def remove(self) -> None:
        """Remove it now. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
