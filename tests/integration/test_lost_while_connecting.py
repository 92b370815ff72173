"""An engine that is found dead while the fleet connects ends the wait of its holders."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from tests.fleets.loop import CONFIG, Loop, drive
from tests.patience import patient
from weightsync.driver.engine_state import EngineState
from weightsync.errors import PeerLostError

GONE = PeerLostError("engine e1", "killed")


def lose(loop: Loop) -> None:
    """End the process of e1. A heartbeat notices it."""
    if loop.fleet.engines["e1"].record.state is EngineState.DEAD:
        return
    attach, attached = loop.engines["e0"].attach, threading.Event()

    def first(*args: Any) -> Any:
        try:
            return attach(*args)
        finally:
            attached.set()

    def gone(*_: object) -> Any:
        attached.wait(patient(20))
        raise GONE

    loop.engines["e0"].attach, loop.engines["e1"].attach = first, gone
    loop.controller.engine_group.lost("e1", GONE)


@pytest.mark.parametrize("when", ["layouts", "prepare"])
def test_an_engine_that_is_lost_while_the_fleet_connects_is_named_at_once(when: str) -> None:
    async def work(loop: Loop) -> None:
        peer = loop.fleet.trainers[0][0] if when == "layouts" else loop.fleet.holders[0]
        method = "layout" if when == "layouts" else "prepare"
        called = getattr(peer, method)

        async def losing(*args: object) -> Any:
            answer = await called(*args)
            await asyncio.sleep(0.2)  # engines have answered, too
            lose(loop)
            return answer

        setattr(peer, method, losing)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="engine e1"):
            await loop.controller.connect()
        assert time.monotonic() - began < patient(4)
        await loop.controller.connect()
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 0}

    drive(work, CONFIG)
