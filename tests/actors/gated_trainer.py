"""A trainer that says when it publishes, and waits for a file."""

from __future__ import annotations

import time
from pathlib import Path

from tests.actors.fleet import Trainer
from tests.patience import patient
from weightsync.protocol.messages import PublishReport


class Gated(Trainer):
    def __init__(self, width: int, slot: str, folder: str) -> None:
        super().__init__(width, slot)
        self._folder, self._slot_name = Path(folder), slot
        self.num_published = 0

    def sync_publish(self, count: bool, ticket: int = 0) -> PublishReport:
        self.num_published += 1
        if (self._folder / "waits").exists():
            (self._folder / f"{self._slot_name} publishes").touch()
            deadline = time.monotonic() + patient(30)
            while (self._folder / "waits").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return super().sync_publish(count, ticket)

    def published(self) -> int:
        return self.num_published
