"""Waiting for gloo in slices: a slice that ends is no failure, whenever the operation ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from weightsync.transports.gloo import _Spread


class Work:
    """torch's, for a broadcast that ends while the first slice of a wait does."""

    def __init__(self, fails: bool) -> None:
        self._fails, self._done = fails, False

    def is_completed(self) -> bool:
        return self._done

    def wait(self, timeout: timedelta) -> bool:
        if not self._done:
            self._done = True
            raise RuntimeError("Operation timed out!")
        if self._fails:
            raise RuntimeError("Connection closed by peer")
        return True


def test_an_operation_that_ends_just_after_the_slice_is_done() -> None:
    assert _Spread(Work(fails=False)).wait_slice()


def test_an_operation_that_fails_just_after_the_slice_says_why() -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        _Spread(Work(fails=True)).wait_slice()
