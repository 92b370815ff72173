"""One commit of several models: no engine serves a version before engines of all models hold theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from weightsync.errors import StateError


class JointCommit:
    """Where the updates of several models wait for each other, after they compared what engines hold.

    No wait has a deadline of its own: each update has deadlines, and says here how it ends.

    Attributes:
        failed: the first model that failed before the commit, "" if none did.
    """

    def __init__(self, models: Collection[str]) -> None:
        self._missing = set(models)
        self._decided = asyncio.Event()
        self.failed = ""

    async def meet(self, model: str) -> None:
        """Wait until all models can commit. Raises StateError, which names one, if one of them cannot."""
        self._missing.discard(model)
        if not self._missing:
            self._decided.set()
        await self._decided.wait()
        if self.failed:
            raise StateError(f"{self.failed} failed, and {model} was to commit with it")

    def fail(self, model: str) -> None:
        """Say that a model's update ended before it could commit. Ignored once all have met."""
        if not self._decided.is_set():
            self.failed = model
            self._decided.set()
