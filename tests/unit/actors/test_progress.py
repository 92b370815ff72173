"""Bars for long calls and for bytes."""

from __future__ import annotations

import io
import sys
from concurrent.futures import Future

import pytest

from tests.terminal import Terminal
from weightsync.actors.progress import byte_bar, wait_with_bar


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


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO()])
def test_bytes_have_a_bar_on_a_terminal(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with byte_bar("publish") as tell:
        tell(0, 4_000_000)
        tell(1_000_000, 4_000_000)
    shown = terminal.getvalue()
    assert ("publish" in shown, "1.0/4.0 MB" in shown) == (terminal.isatty(), terminal.isatty())


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
