"""Keeps calls out of a library object that is being taken down."""

from __future__ import annotations

import threading

__all__ = ["Gate"]


class Gate:
    """Calls enter and leave until it is shut; shutting waits for who is inside, but not for ever."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._is_shut = 0, False

    def enter(self) -> bool:
        """Whether the caller is in, and must leave; never blocks."""
        with self._changed:
            self._inside += not self._is_shut
            return not self._is_shut

    def leave(self) -> None:
        """The caller's call has returned."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self, timeout_s: float) -> None:
        """Let nobody in any more; returns when nobody is inside, or after `timeout_s` seconds."""
        with self._changed:
            self._is_shut = True
            self._changed.wait_for(lambda: self._inside == 0, timeout_s)
