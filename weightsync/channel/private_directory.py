"""A folder for sockets that no other user of the host may open."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path


class PrivateDirectory:
    """A directory of mode 0700, removed when this process ends, even by SIGKILL."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="weightsync-"))
        # The shell removes the directory once its standard input ends, which happens when this process does.
        # It is detached, since Ray may kill the children of a worker with it.
        script = 'exec 3<&0; (read -r _ <&3; rm -rf "$1") >/dev/null 2>&1 &'
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._janitor.wait()

    def remove(self) -> None:
        """Remove the directory now. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
