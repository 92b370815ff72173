"""Waiting for several by name."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import pytest

from tests.patience import patient
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerLostError


def test_who_is_no_longer_waited_for_is_cancelled_and_leaves_no_error_behind() -> None:
    ended: list[str] = []
    unasked: list[Mapping[str, Any]] = []
    started = asyncio.Event()

    async def is_lost() -> None:
        try:
            started.set()
            await asyncio.sleep(60)
        finally:
            ended.append("holder 0")
            raise PeerLostError("holder 0", "it was killed")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unasked.append(context))
        waiting = asyncio.create_task(gather_named({"holder 0": is_lost()}, "keep", 60))
        await asyncio.wait_for(started.wait(), patient(10))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["holder 0"]
        del waiting
        gc.collect()

    asyncio.run(run())
    assert unasked == []
