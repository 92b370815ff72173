"""Events reach those that subscribed to their type, in order."""

from __future__ import annotations

from weightsync.driver.events import EngineFailed, Events, HolderSilent
from weightsync.errors import EngineError


def test_each_subscriber_of_the_type_is_told_in_the_order_of_subscribing() -> None:
    events, told = Events(), []
    events.subscribe(EngineFailed, lambda event: told.append(("first", event.name)))
    events.subscribe(HolderSilent, lambda event: told.append(("silent", event)))
    events.subscribe(EngineFailed, lambda event: told.append(("second", event.name)))
    events.publish(EngineFailed("e0", EngineError("e0", "move", "broke")))
    assert told == [("first", "e0"), ("second", "e0")]
    events.publish(HolderSilent())
    assert told[2:] == [("silent", HolderSilent())]
