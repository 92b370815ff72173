"""A relay that is not connected asks nobody, and connects again once its link has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.relays.move_relay import MoveRelay
from weightsync.errors import PeerError
from weightsync.protocol.messages import Receive


class Links:
    """Notes what is asked of it. A link that it opens is not dialled yet."""

    def __init__(self) -> None:
        self.asked = list[str]()

    def open(self, relay: MoveRelay) -> None:
        self.asked.append("open")
        relay.node = SimpleNamespace(is_dialled=False)  # type: ignore[assignment]

    def end(self, key: object, error: PeerError) -> None:
        self.asked.append(f"end: {error}")


def relay(links: Links, node: Any) -> MoveRelay:
    holders = {i: SimpleNamespace(name=f"holder {i}", handle=i) for i in (2, 5)}
    made = MoveRelay(cast("NodeLinks", links), cast("Any", holders))
    made.node = node
    return made


@pytest.mark.parametrize("now", [None, SimpleNamespace(is_dialled=False)], ids=["none", "lost"])
def test_a_relay_without_a_connection_calls_nobody(now: Any) -> None:
    links = Links()
    tasks = dict.fromkeys((2, 5), Receive())
    assert asyncio.run(cast("Any", relay(links, now).move(3, tasks, 1.0))) == {2: None, 5: None}
    assert links.asked == ["open"]


def test_a_relay_without_a_link_has_no_news() -> None:
    with pytest.raises(PeerError, match=r"holders through holder 2.*no connection"):
        asyncio.run(cast("Any", relay(Links(), None).moved()))


def test_a_relay_that_is_renewed_gets_another_link() -> None:
    """Calls of the old link are then not carried out: it has ended, and with it the holder's node for it."""
    links = Links()
    relay(links, SimpleNamespace(is_dialled=True)).renew()
    assert links.asked == ["end: holders through holder 2 failed: its link was renewed", "open"]
