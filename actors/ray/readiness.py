"""A trainer's weights, which the driver asks for by a socket and by Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from weightsync.protocol.messages import PublishReport


class Readiness:
    """Has weights ready, and published, once for each `publish` of the driver, whichever way asks first.

    A socket's thread asks a millisecond before Ray brings the call. It leaves all to Ray while another call
    of the actor runs, which may still change the weights.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        """`ready`: prepares the weights, and returns whether they are read in place.

        Make this object in a call of the actor, on the thread that runs the actor's calls.
        """
        self._ready = ready
        self._thread, self._ray = threading.get_ident(), frozenset(_frames(sys._getframe()))
        self._has_others = threading.current_thread() is not threading.main_thread()
        self._lock, self._early_for = threading.RLock(), 0
        self._published: tuple[int, PublishReport | None] = 0, None

    def early(self, ticket: int) -> bool:
        """Say on another thread whether holders may read, before `publish` number `ticket`, which is not 0.

        Returns False while a call of the actor runs, and always if the actor runs calls on several threads.
        """
        # Of the frames in which this object was made, only Ray's can still run, which wait for calls.
        top = sys._current_frames().get(self._thread)
        if self._has_others or top not in self._ray:
            return False
        self._ray = frozenset(_frames(top))
        with self._lock:
            self._early_for = ticket if self._ready() else 0
            return bool(self._early_for)

    def has_said(self, ticket: int) -> bool:
        """Return whether `early` has said so for `publish` number `ticket`. Asked once."""
        with self._lock:
            said, self._early_for = self._early_for, 0
            return bool(ticket) and said == ticket

    def once(self, ticket: int, publish: Callable[[], PublishReport]) -> PublishReport:
        """Return the report of `publish` number `ticket`, or call `publish`. Calls run one at a time."""
        with self._lock:
            number, report = self._published
            if not report or not ticket or number != ticket:
                report = publish()
                self._published = ticket, report
            return report


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
