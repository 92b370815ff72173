"""What a run has left: its processes, which have `MARK` in their environment, and our files."""

from __future__ import annotations

import tempfile
from pathlib import Path

MARK = "WEIGHTSYNC_TEST_RUN"


def processes(mark: str) -> dict[int, str]:
    """Command lines of a run's processes, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            # Ray's own agents take minutes to see that their raylet was killed.
            command = (entry / "cmdline").read_bytes().decode()
            if "DashboardAgent" not in command and "RuntimeEnvAgent" not in command:
                found[int(entry.name)] = command
        except OSError:
            continue  # it ended while we looked
    return found


def our_files(temporary: str = tempfile.gettempdir()) -> set[str]:
    """Return our files and folders in `temporary`, the TMPDIR of a run, and in /dev/shm."""
    return {str(path) for folder in (temporary, "/dev/shm") for path in Path(folder).glob("weightsync*")}
