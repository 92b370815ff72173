"""A relay that is not connected asks nobody, and connects again once it was lost or is stuck."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightsync.actors.ray.control_channels import ControlChannels
from weightsync.actors.relays.move_relay import MoveRelay
from weightsync.protocol.messages import UpdateTask


class Channels:
    """Notes what is asked of it. A channel that it opens is not dialled yet."""

    def __init__(self) -> None:
        self.asked = list[str]()

    def open(self, relay: MoveRelay) -> None:
        self.asked.append("open")
        relay.channel = channel(is_open=False, stuck=False)

    def forget(self, key: object) -> None:
        self.asked.append("forget")


def channel(is_open: bool, stuck: bool) -> Any:
    return SimpleNamespace(is_open=is_open, stuck=stuck, call=lambda *_: None)


@pytest.mark.parametrize(
    ("now", "asked"),
    [
        (None, ["open"]),
        (channel(is_open=False, stuck=False), ["open"]),
        (channel(is_open=True, stuck=True), ["forget", "open"]),
    ],
    ids=["none", "lost or not dialled", "stuck"],
)
def test_a_relay_without_a_connection_calls_nobody(now: Any, asked: list[str]) -> None:
    channels, holders = Channels(), {i: SimpleNamespace(name=f"holder {i}", handle=i) for i in (2, 5)}
    relay = MoveRelay(cast("ControlChannels", channels), cast("Any", holders))
    relay.channel = now
    tasks = dict.fromkeys(holders, (True, UpdateTask()))
    assert asyncio.run(cast("Any", relay.move(3, tasks, 1.0))) == {2: None, 5: None}
    assert channels.asked == asked
