"""The processes of an engine's ranks, where they are the engine's children: whether each of them runs."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weightsync.errors import RankLostError

__all__ = ["ProcessStat", "RankProcess", "RankWatch", "process_stat"]


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


_LOOK_S = 0.05
_STOPPED_S = 0.5
"""Who is stopped for less goes on as if nothing had been."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process `pid` of `rank`; `started` tells it from a later process of the same number."""

    rank: int
    pid: int
    started: str

    @classmethod
    def join(cls, rank: int, engine_pid: int) -> RankProcess | None:
        """This process, as a rank of the engine whose process started it; None if that did not start it.

        From now on it ends when the engine's does, even while it is stopped, and so its memory is given
        back (`man 2 PR_SET_PDEATHSIG`).
        """
        if os.getppid() != engine_pid:
            return None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        return cls.of(rank, os.getpid())

    @classmethod
    def of(cls, rank: int, pid: int) -> RankProcess:
        """The process that has this `pid` now."""
        return cls(rank, pid, process_stat(pid).started)

    def state(self) -> str:
        """As ps has it, ``T`` for stopped; nothing if it has ended."""
        stat = process_stat(self.pid)
        return stat.state if stat.started == self.started and stat.state not in "XZ" else ""

    def end(self) -> None:
        """Kill it, if it is still there."""
        if self.state():
            os.kill(self.pid, signal.SIGKILL)


class RankWatch:
    """Looks at the processes of an engine's ranks twenty times a second, on a thread of its own.

    The first that ended, or is stopped, is told once. A vLLM that loses one rank ends the others, so whoever
    looks later cannot tell which it was.

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
        """Look no more: they are about to end."""
        self._closed.set()

    def end(self) -> None:
        """Kill them all: one that is stopped would keep the engine from ending."""
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
        self._stopped[rank] = self._stopped[rank] + 1 if state == "T" else 0
        if not state:
            return f"its process {rank.pid} ended"
        return f"its process {rank.pid} is stopped" if self._stopped[rank] * _LOOK_S >= _STOPPED_S else ""
