"""A trainer that digests until a file exists."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.patience import patient
from weightsync import TrainerShard
from weightsync.protocol.handles import Attached
from weightsync.protocol.messages import Published

PLAN: Any = SimpleNamespace(frozen=())


class Digesting:
    """A source that is read in place, and digests until a file is there."""

    def __init__(self, may_end: Path) -> None:
        self._may_end, self.num_ready = may_end, 0

    def trial_handle(self) -> None: ...

    def attach(self, *_: object) -> Attached:
        return Attached("digest", None)

    def ready(self) -> bool:
        self.num_ready += 1
        return True

    def publish(self, count: bool) -> Published:
        deadline = time.monotonic() + patient(30)
        while not self._may_end.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return Published(np.ones(3, np.uint64), {})


class Trainer(TrainerShard):
    def __init__(self, may_end: Path) -> None:
        self.source = Digesting(may_end)  # type: ignore[assignment]

    def num_ready(self) -> int:
        return self.source.num_ready  # type: ignore[union-attr, no-any-return]

    def work(self, begun: Path, may_end: Path) -> None:
        begun.touch()
        deadline = time.monotonic() + patient(30)
        while not may_end.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
