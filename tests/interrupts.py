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
    while sys._current_frames()[main].f_code.co_name != "wait":
        await asyncio.sleep(0.01)
    signal.pthread_kill(main, signal.SIGINT)
