"""The outcome of a command: its exit code, and what is told of it."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.recipes.cluster import existing_cluster, local_cluster
from weightsync.recipes.report.run_folder import RunFolder
from weightsync.recipes.report.screen import Screen

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
ASKED_FOR = ("report.json", "trace.json")
"""A run without these files has failed. A page can be made again, and logs are extra."""


def complain(message: object, code: int) -> int:
    """Print a message for the user, and return `code`."""
    print(f"weightsync: {message}", file=sys.stderr)
    return code


def with_cluster(folder: RunFolder, num_at_once: int, inside: Callable[[], int]) -> int:
    """Return the exit code of `inside`. Prints the outcome first, then the files that were not written."""
    try:
        code = _outcome(folder, num_at_once, inside)
    except Exception:  # noqa: BLE001 (Python would print it after our message)
        traceback.print_exc()
        code = FAILED
    if complaint := folder.complaint():
        complain(complaint, code)
    return FAILED if code == DONE and folder.lacks(ASKED_FOR) else code


def _outcome(folder: RunFolder, num_at_once: int, inside: Callable[[], int]) -> int:
    threads, logs = max(1, (os.cpu_count() or 1) // num_at_once), folder.path / "logs"
    try:
        with ExitStack() as cluster:
            with Screen(Console()).stage("join the Ray cluster" if existing_cluster() else "start Ray"):
                cluster.enter_context(local_cluster(folder, threads_per_actor=threads))
            # SIGTERM ends a job like Ctrl-C: actors are closed and the report is written.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                return inside()
            except WeightSyncError as error:
                code = BAD_INPUT if isinstance(error, ConfigError) else FAILED
                return complain(f"{str(error).rstrip('.')}; logs are in {logs}", code)
            except KeyboardInterrupt:  # said before Ray ends: `ray job stop` kills a job after seconds
                return complain("interrupted", INTERRUPTED)
    except ConfigError as error:
        return complain(error, BAD_INPUT)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
