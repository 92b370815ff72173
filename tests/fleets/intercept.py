"""Puts a test's own function around the driver's calls of one method of actors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.patience import patient
from weightsync.actors.ray.remote import Remote

Call = Callable[..., Awaitable[Any]]

CALLS = {
    "publish": "publish",
    "pause": "pause",
    "move": "move",
    "commit": "resume",
    "keep": "snapshot",
    "refill": "refill",
}
"""What the driver asks of actors first in each phase. In phase verify it asks nothing."""


def intercept(method: str, make: Callable[[Call], Call]) -> Callable[[], None]:
    """Have calls of `method` go through ``make(call)``. Returns a function that undoes it.

    Both get the `Remote`, the method's name and its arguments.
    """
    call = Remote.call
    made = make(call)

    async def chosen(remote: Remote, name: str, *args: object) -> Any:
        return await (made if name == method else call)(remote, name, *args)

    def undo() -> None:
        Remote.call = call  # type: ignore[method-assign]

    Remote.call = chosen  # type: ignore[method-assign]
    return undo


@contextmanager
def names_called(method: str) -> Iterator[list[str]]:
    """Record which actors the driver calls `method` of: their names, in the order of the calls."""
    names: list[str] = []

    def make(call: Call) -> Call:
        async def noted(remote: Remote, *args: object) -> Any:
            names.append(remote.name)
            return await call(remote, *args)

        return noted

    undo = intercept(method, make)
    try:
        yield names
    finally:
        undo()


@contextmanager
def held(method: str) -> Iterator[None]:
    """Hold the driver's calls of `method` back until the end of the context."""
    may_go = threading.Event()

    def make(call: Call) -> Call:
        async def late(remote: Remote, *args: object) -> Any:
            await asyncio.to_thread(may_go.wait, patient(30))
            return await call(remote, *args)

        return late

    undo = intercept(method, make)
    try:
        yield
    finally:
        may_go.set()
        undo()
