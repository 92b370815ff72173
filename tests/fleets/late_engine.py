"""An engine whose commit of version 2 ends too late."""

from __future__ import annotations

import threading

import torch

from tests.fleets.actors import Engine
from tests.patience import patient
from weightsync.driver.gather import GRACE_S

TIMEOUT_S = patient(0.5)


class Late(Engine):
    """Commits version 2 for longer than the driver waits. Notes what is written while it serves."""

    def __init__(self, width: int, name: str, slot: str) -> None:
        super().__init__(width, name, slot)
        engine, resume = self._engine, self._engine.resume
        self._mixes, begun, committed = list[str](), threading.Event(), threading.Event()

        def late(version: int) -> None:
            if version == 2 and not begun.is_set():
                begun.set()
                committed.wait(1.5 * TIMEOUT_S + GRACE_S)
                resume(version)
                committed.set()
            else:
                resume(version)

        def write(name: str) -> None:
            if begun.is_set():
                assert committed.wait(patient(30))
            if not engine.paused:
                self._mixes.append(name)

        engine.resume, engine.on_write = late, write  # type: ignore[method-assign]

    async def mixes(self) -> list[str]:
        return self._mixes

    async def weights(self) -> dict[str, torch.Tensor]:
        return dict(self._engine.tensors)
