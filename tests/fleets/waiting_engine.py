"""An engine that takes as long to start as a test wants."""

from __future__ import annotations

import time
from pathlib import Path

from tests.fleets.actors import Engine
from tests.patience import patient


class WaitingEngine(Engine):
    """Starts once a file exists."""

    def __init__(self, width: int, name: str, slot: str, may_start: Path) -> None:
        deadline = time.monotonic() + patient(60)
        while not may_start.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)  # the file comes from another process
        super().__init__(width, name, slot)
