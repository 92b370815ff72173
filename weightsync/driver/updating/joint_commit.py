"""One commit of several models: no engine serves a version before engines of all models hold theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from weightsync.errors import StateError


class JointCommit:
    """Makes updates of several models wait for each other, before engines pause and before they commit.

    A version is published, and staged if ``sync.stage`` says so, before engines pause. So no engine is paused
    while another model's weights are on the way to their hosts. The waits have no deadlines of their own:
    every update has deadlines, and reports its end here.

    Attributes:
        failed: the first model that failed before the commit, or "".
    """

    def __init__(self, models: Collection[str]) -> None:
        self._pause, self._commit = _Meeting(models), _Meeting(models)
        self.failed = ""

    async def meet_before_pause(self, model: str) -> None:
        """Wait until all models can pause. Raises StateError, which names one, if one has failed."""
        await self._meet(self._pause, model)

    async def meet_before_commit(self, model: str) -> None:
        """Wait until all models can commit. Raises StateError, which names one, if one of them cannot."""
        await self._meet(self._commit, model)

    async def _meet(self, meeting: _Meeting, model: str) -> None:
        await meeting.join(model)
        if self.failed:
            raise StateError(f"{self.failed} failed, and {model} was to commit with it")

    def fail(self, model: str) -> None:
        """Say that a model's update ended before it could commit. Ignored once all can commit."""
        if not self._commit.over.is_set() and not self.failed:
            self.failed = model
            self._pause.over.set()
            self._commit.over.set()


@dataclass(frozen=True, slots=True)
class JointMember:
    """One model in a `JointCommit`."""

    joint: JointCommit
    model: str

    async def before_pause(self) -> None:
        """Wait for the others, see `JointCommit.meet_before_pause`."""
        await self.joint.meet_before_pause(self.model)

    async def before_commit(self) -> None:
        """Wait for the others, see `JointCommit.meet_before_commit`."""
        await self.joint.meet_before_commit(self.model)


class _Meeting:
    def __init__(self, models: Collection[str]) -> None:
        self._missing, self.over = set(models), asyncio.Event()

    async def join(self, model: str) -> None:
        """Wait for all models, or for the end of the wait.

        A model that rejoins only waits for the other models.
        """
        self._missing.discard(model)
        if not self._missing:
            self.over.set()
        await self.over.wait()
