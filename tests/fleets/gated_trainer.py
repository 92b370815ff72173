"""Trainers that say that they publish, or have published, and wait for a file."""

from __future__ import annotations

import time
from pathlib import Path

from tests.fleets.actors import Trainer
from tests.patience import patient
from weightsync.protocol.messages import PublishReport, PublishTask


class Gated(Trainer):
    def __init__(self, width: int, slot: str, folder: str) -> None:
        super().__init__(width, slot)
        self._folder, self._slot_name = Path(folder), slot
        self.num_published = 0

    def sync_publish(self, task: PublishTask, ticket: int = 0, tells: bool = False) -> PublishReport:
        self.num_published += 1
        self._wait("publishes")
        return super().sync_publish(task, ticket, tells)

    def published(self) -> int:
        return self.num_published

    def _wait(self, doing: str) -> None:
        if (self._folder / "waits").exists():
            (self._folder / f"{self._slot_name} {doing}").touch()
            deadline = time.monotonic() + patient(30)
            while (self._folder / "waits").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)


class AnswersLate(Gated):
    """Publishes at once. Ray gets its answer when it has waited."""

    def sync_publish(self, task: PublishTask, ticket: int = 0, tells: bool = False) -> PublishReport:
        report = Trainer.sync_publish(self, task, ticket, tells)
        self._wait("answers")
        return report
