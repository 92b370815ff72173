"""Watches the processes of an engine's ranks that are children of the engine's process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from weightsync.errors import RankLostError

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def process_state(pid: int) -> tuple[int, str]:
    """Return identity, as in `RankProcess`, and status of process `pid`; 0 and "" once it ended."""
    try:
        process = psutil.Process(pid)
        status: str = process.status()
    except psutil.NoSuchProcess:
        return 0, ""
    return (0, "") if status in _ENDED else (hash(process), status)


def this_host() -> str:
    """Return a name that is equal for processes of one host, and differs between containers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}".rstrip()


_LOOK_S = 0.05
_STOPPED_S = 0.5
"""A process that is stopped for less than this does not count as lost."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process `pid` of `rank`.

    Attributes:
        identity: psutil's hash of pid and start, the same in every process and after a step of the clock. It
            distinguishes the process from a later one with that pid.
    """

    rank: int
    pid: int
    identity: int

    @classmethod
    def join(cls, rank: int, engine_pid: int) -> RankProcess | None:
        """Return this process as a rank; None if the parent process is not `engine_pid`.

        From now on this process ends when the engine's process ends, even while it is stopped, which frees
        the rank's memory (`man 2 PR_SET_PDEATHSIG`).
        """
        if os.getppid() != engine_pid:
            return None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        return cls.of(rank, os.getpid())

    @classmethod
    def of(cls, rank: int, pid: int) -> RankProcess:
        """Return the process that has this `pid` now."""
        return cls(rank, pid, process_state(pid)[0])

    def state(self) -> str:
        """Return the status that psutil gives; "" if the process has ended."""
        identity, status = process_state(self.pid)
        return status if identity == self.identity else ""

    def end(self) -> None:
        """Kill the process if it still exists."""
        if self.state():
            os.kill(self.pid, signal.SIGKILL)


class RankWatch:
    """Polls the processes of an engine's ranks every 0.05 s, on a thread.

    It calls `lost` once, for the first process that ended or is stopped. vLLM ends all ranks after it loses a
    rank, so a later look could not tell the first lost rank.

    Attributes:
        ranks: the processes.
    """

    def __init__(
        self, engine: str, ranks: Sequence[RankProcess], lost: Callable[[RankLostError], None]
    ) -> None:
        self._engine, self.ranks, self._lost = engine, ranks, lost
        self._stopped = dict.fromkeys(ranks, 0)
        self._closed = threading.Event()
        if ranks:
            threading.Thread(target=self._run, name=f"ranks-{engine}", daemon=True).start()

    def close(self) -> None:
        """Stop watching, since the processes are about to end."""
        self._closed.set()

    def end(self) -> None:
        """Kill all processes, since a stopped one would keep the engine from ending."""
        for rank in self.ranks:
            rank.end()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for rank in self.ranks:
                if (cause := self._cause(rank)) and not self._closed.is_set():
                    self._lost(RankLostError(self._engine, "watch", cause, rank.rank))
                    return

    def _cause(self, rank: RankProcess) -> str:
        state = rank.state()
        self._stopped[rank] = self._stopped[rank] + 1 if state == psutil.STATUS_STOPPED else 0
        if not state:
            return f"its process {rank.pid} ended"
        return f"its process {rank.pid} is stopped" if self._stopped[rank] * _LOOK_S >= _STOPPED_S else ""
