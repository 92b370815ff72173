"""An engine that notes when it is paused, holds a version and serves again."""

from __future__ import annotations

import threading
import time

from tests.fleets.actors import Engine
from weightsync.protocol.messages import LoadReport


class Noting(Engine):
    """Takes as long over each version as `slow_down` said."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__(width, name, name)
        self._notes: list[tuple[str, float]] = []

    def _note(self, what: str) -> None:
        self._notes.append((what, time.monotonic()))

    def sync_pause(self, mode: str, timeout_s: float) -> None:
        self._note("paused")
        super().sync_pause(mode, timeout_s)

    def sync_load(self, attempt: int, timeout_s: float) -> LoadReport:
        report = super().sync_load(attempt, timeout_s)
        self._note("loaded")
        return report

    def sync_resume(self, version: int) -> None:
        self._note(f"serves {version}")
        super().sync_resume(version)

    async def notes(self) -> list[tuple[str, float]]:
        """What happened since the last call, by a clock that all processes of this host share."""
        notes, self._notes = self._notes, []
        return notes

    async def slow_down(self, seconds: float) -> None:
        first, never = next(iter(self._engine.tensors)), threading.Event()
        self._engine.on_write = lambda tensor: never.wait(seconds if tensor == first else 0) and None
