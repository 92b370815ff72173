"""Print the files and functions that an update passes, process by process.

    bash scripts/follow [update | direct | refill | connect]

The trainer and the two engines of the test fleet run as threads of this process. Each call is listed under
the process of its thread, and each function where it is first entered. The last line has three numbers:
files, changes of file (a thread's next call is in another file), and lines of the functions entered. Left
out: what runs on import, such as bodies of modules, and communicators' timers that ran before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fleets.direct import Direct
from tests.fleets.loop import CONFIG, Loop

LIBRARY = Path(__file__).parents[1] / "weightsync"
DRIVER = "driver"
_TIMERS = ("weightsync-listener", "weightsync-timer", "weightsync-store")
_SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_process: contextvars.ContextVar[str] = contextvars.ContextVar("process")


@dataclass
class Followed:
    """The recorded calls to functions of the library.

    Attributes:
        first: (process, function) in the order of their first calls.
        num_changes: number of times that a thread went to another file.
        is_on: whether calls are recorded.
    """

    first: dict[tuple[str, CodeType], None] = field(default_factory=dict)
    num_changes: int = 0
    is_on: bool = False
    _files: dict[int, str] = field(default_factory=dict)
    _timers: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Record calls from now on, without those of timers that run already."""
        running = (thread for thread in threading.enumerate() if thread.name in _TIMERS)
        self._timers, self.is_on = frozenset(thread.ident or 0 for thread in running), True

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call. A profile function, see `sys.setprofile`."""
        code = frame.f_code
        if not self.is_on or event != "call" or not code.co_filename.startswith(str(LIBRARY)):
            return
        goes_on = code.co_flags & _SUSPENDS and frame.f_lasti > 0 and frame.f_lineno != code.co_firstlineno
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        is_import = frame.f_back is not None and frame.f_back.f_code.co_name == "<module>"
        if goes_on or not is_function or is_import or code.co_filename.endswith("testing.py"):
            return
        thread = threading.get_ident()
        if thread in self._timers:
            return
        process = _process.get(getattr(threading.current_thread(), "process", DRIVER))
        self.first.setdefault((process, code))
        self.num_changes += self._files.setdefault(thread, code.co_filename) != code.co_filename
        self._files[thread] = code.co_filename

    def page(self) -> str:
        """Return the recorded calls as text."""
        alike: dict[str, list[str]] = {}
        for process in dict.fromkeys(process for process, _ in self.first):
            alike.setdefault(self._way(process), []).append(process)
        lines = [f"{', '.join(sorted(processes))}\n{way}\n" for way, processes in alike.items()]
        entered = {code for _, code in self.first}
        num_files = len({code.co_filename for code in entered})
        num_lines = sum(len(inspect.getsourcelines(code)[0]) for code in entered)
        lines.append(f"{num_files} files, {self.num_changes} changes of file, {num_lines} lines of functions")
        return "\n".join(lines)

    def _way(self, process: str) -> str:
        codes = [code for name, code in self.first if name == process]
        return "\n".join(
            f"  {Path(file).relative_to(LIBRARY)!s:32} "
            + ", ".join(dict.fromkeys(getattr(code, "co_qualname", code.co_name) for code in functions))
            for file, functions in groupby(codes, key=lambda code: code.co_filename)
        )


class NamedPeer:
    """A peer whose calls are recorded under the name of its process."""

    def __init__(self, peer: object, name: str) -> None:
        self._peer, self._name = peer, name

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(self._peer, method)
        if method == "ask_readable":  # returns no coroutine
            return call

        async def named(*args: object) -> object:
            _process.set(self._name)
            return await call(*args)

        # A separate task, so that the name ends with the call.
        return lambda *args: asyncio.ensure_future(named(*args))


def name_processes(loop: Loop) -> None:
    """Name each peer after its process, and each thread after its starting process."""
    fleet = loop.fleet
    fleet.trainers[:] = [(NamedPeer(peer, f"trainer {i}"), at) for i, (peer, at) in enumerate(fleet.trainers)]
    fleet.holders[:] = [NamedPeer(peer, f"holder {i}") for i, peer in enumerate(fleet.holders)]
    for name, seat in fleet.engines.items():
        seat.peer = NamedPeer(seat.peer, f"engine {name}")
    start = threading.Thread.start

    def start_named(self: threading.Thread) -> None:
        self.process = _process.get(getattr(threading.current_thread(), "process", DRIVER))  # type: ignore[attr-defined]
        start(self)

    threading.Thread.start = start_named  # type: ignore[method-assign]


async def follow(kind: str, loop: Loop) -> Followed:
    """Prepare the fleet for `kind`, then record that step alone."""
    controller, followed = loop.controller, Followed()
    threading.setprofile(followed.note)  # threads that start before the step take part in it
    sys.setprofile(followed.note)
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "connect": controller.connect,
        "update": lambda: controller.update(2),
        "direct": lambda: controller.update(2),
        "refill": lambda: controller.refill("e1"),
    }
    if kind != "connect":
        await controller.connect()
        await controller.update(1)
    if kind == "refill":
        loop.engines["e1"].on_write = _fail
        await controller.update(2)
        loop.engines["e1"].on_write = lambda _: None
        await controller.snapshot_index.settled()
    followed.begin()
    await steps[kind]()
    followed.is_on = False
    return followed


def _fail(tensor: str) -> None:
    raise MemoryError(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kind", nargs="?", default="update", choices=["update", "direct", "refill", "connect"]
    )
    kind = parser.parse_args().kind
    loop = Direct(CONFIG) if kind == "direct" else Loop(CONFIG)
    name_processes(loop)
    try:
        sys.stdout.write(asyncio.run(follow(kind, loop)).page() + "\n")
    finally:
        loop.close()


if __name__ == "__main__":
    main()
