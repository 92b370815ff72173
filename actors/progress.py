"""Bars for long calls and for bytes, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_SOON_S = 0.5
"""A shorter call shows no bar."""
_LOOK_S = 0.1


def wait_with_bar(future: Future[T], what: str, share: Callable[[], float]) -> T:
    """Return the result of `future`. Until then show a bar on stderr, if stderr is a terminal.

    `share`: returns how much is done, from 0 to 1. At 0 the bar only shows that work goes on.
    """
    if sys.stderr is None or not sys.stderr.isatty() or not wait([future], _SOON_S).not_done:
        return future.result()
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False
    ) as bar:
        task = bar.add_task(what, total=None)
        while wait([future], _LOOK_S).not_done:
            done = share()
            bar.update(task, completed=done, total=1.0 if done else None, refresh=True)
    return future.result()


@contextmanager
def byte_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr during the body, if stderr is a terminal.

    Yields a function that is told the bytes that have moved, and all bytes.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
