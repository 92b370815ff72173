"""Ctrl-C while a call waits."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading


async def interrupt_waiting_call() -> None:
    """Send SIGINT to the main thread once it waits. Elsewhere, a finalizer may swallow the error."""
    main = threading.main_thread().ident
    assert main
    while (waiting := sys._current_frames()[main]).f_code.co_name != "wait":
        await asyncio.sleep(0.01)
    while sys._current_frames()[main] is waiting:  # a signal that comes just before it blocks wakes nobody
        signal.pthread_kill(main, signal.SIGINT)
        await asyncio.sleep(0.05)
