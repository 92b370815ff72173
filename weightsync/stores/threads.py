"""Work on several files at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 8


def on_threads(run: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``run(item)`` for each item, in order. Starts no more after an error or Ctrl-C."""
    pool = ThreadPoolExecutor(NUM_THREADS)
    try:
        return [future.result() for future in [pool.submit(run, item) for item in items]]
    finally:
        pool.shutdown(cancel_futures=True)
