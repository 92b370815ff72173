"""What an engine's actor answers, without Ray."""

from __future__ import annotations

import asyncio
import time

from actors.engine_calls import EngineCalls


class Adapter:
    def __init__(self) -> None:
        self.num_asked = 0

    def layout(self) -> list[object]:
        self.num_asked += 1
        time.sleep(0.05)
        return []


def test_an_engine_works_out_its_layout_once_though_two_ask_at_a_time() -> None:
    calls = EngineCalls()
    calls._engine = adapter = Adapter()  # type: ignore[assignment]

    async def ask() -> None:
        assert await asyncio.gather(calls.sync_seats(), calls.sync_layout()) == [[], []]
        assert await calls.sync_seats() == []

    asyncio.run(ask())
    assert adapter.num_asked == 1
