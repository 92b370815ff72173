"""What the kernel says of a process of this host: see `man 5 proc_pid_stat`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessStat", "process_stat"]


class ProcessStat(NamedTuple):
    """Empty if there is no such process.

    Attributes:
        state: as ps has it, ``T`` for stopped, ``X`` and ``Z`` for ended.
        num_threads: more than 1 where it has ended, but threads of it hold its memory still.
        started: in clock ticks since the host's start; it tells processes of one number apart.
    """

    state: str = ""
    num_threads: int = 0
    started: str = ""


def process_stat(pid: int) -> ProcessStat:
    """Of process `pid`, now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessStat()
    return ProcessStat(fields[0], int(fields[17]), fields[19])
