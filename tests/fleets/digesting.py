"""A trainer that digests until a file exists."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.patience import patient
from weightsync import TrainerShard
from weightsync.errors import WeightSyncError
from weightsync.protocol.messages import Attached, Published, PublishReport, PublishTask

PLAN: Any = SimpleNamespace(frozen=())


class Digesting:
    """A source that is read in place, and digests until a file is there."""

    def __init__(self, may_end: Path) -> None:
        self._may_end, self.num_ready, self.num_published = may_end, 0, 0
        self.raises: WeightSyncError | None = None
        self.counts: dict[str, int] = {}

    def trial_handle(self) -> None: ...

    def attach(self, *_: object) -> Attached:
        return Attached("digest", None)

    def ready(self) -> bool:
        self.num_ready += 1
        return True

    def publish(self, count: bool) -> Published:
        self.num_published += 1
        if self.raises:
            raise self.raises
        _wait_for(self._may_end)
        return Published(np.ones(3, np.uint64), self.counts)


class Trainer(TrainerShard):
    def __init__(self, may_end: Path) -> None:
        self.source = self.digesting = Digesting(may_end)  # type: ignore[assignment]
        self.num_by_ray = 0

    def sync_publish(self, task: PublishTask, ticket: int = 0, tells: bool = False) -> PublishReport:
        self.num_by_ray += 1
        return super().sync_publish(task, ticket, tells)

    def seen(self) -> tuple[int, int, int]:
        """How often it was ready, has published, and was called by Ray to do so."""
        return self.digesting.num_ready, self.digesting.num_published, self.num_by_ray

    def fail(self, error: WeightSyncError) -> None:
        self.digesting.raises = error

    def count(self, num_tensors: int) -> None:
        self.digesting.counts = {f"model.layers.{i}.weight": 1 for i in range(num_tensors)}

    def work(self, begun: Path, may_end: Path) -> None:
        begun.touch()
        _wait_for(may_end)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + patient(30)
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
