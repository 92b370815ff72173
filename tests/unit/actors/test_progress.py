"""A bar for long calls."""

from __future__ import annotations

import io
import sys
from concurrent.futures import Future

import pytest

from tests.terminal import Terminal
from weightsync.actors.progress import wait_with_bar


def test_a_bar_shows_the_share_and_ends_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    future, shown, shares = Future[str](), Terminal(), iter((0.0, 0.5))

    def share() -> float:
        done = next(shares)
        if done:
            future.set_result("done")
        return done

    monkeypatch.setattr(sys, "stderr", shown)
    assert wait_with_bar(future, "read base", share) == "done"
    assert "read base" in shown.getvalue()
    assert "0:00:00" in shown.getvalue()
    assert list(shares) == []


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO(), None])
def test_short_calls_and_other_places_than_terminals_have_no_bar(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: Future[str] = Future()
    refused.set_exception(ValueError("no"))
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(ValueError, match="no"):
        wait_with_bar(refused, "connect", lambda: 1 / 0)
    assert not stderr or not stderr.getvalue()
