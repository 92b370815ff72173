"""One commit of several models: no engine serves a new version before engines of all models have one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial

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

    def member(self, model: str) -> JointMember:
        """Return the waits of one model. If a model fails, the waits raise a StateError that names it."""
        return JointMember(partial(self._meet, self._pause, model), partial(self._meet, self._commit, model))

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
    """One model in a `JointCommit`. It waits until all models can pause, or can commit."""

    before_pause: Callable[[], Awaitable[None]]
    before_commit: Callable[[], Awaitable[None]]


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
