"""The sum of the reads of several ranks or hosts."""

from __future__ import annotations

from weightsync.protocol.messages import Refilled


def test_a_holder_that_was_read_in_two_ways_has_both() -> None:
    parts = [
        Refilled({"holder 0": 5, "holder 1": 1}, {"holder 0": "zeromq, delta", "holder 1": "own"}, 1.0),
        Refilled({"holder 0": 100}, {"holder 0": "mapped"}, 3.0, ("holder 2",)),
        Refilled({"holder 0": 100}, {"holder 0": "mapped"}, 2.0, ("holder 2",)),
    ]
    ways = {"holder 0": "mapped and zeromq, delta", "holder 1": "own"}
    assert Refilled.together(parts) == Refilled({"holder 0": 205, "holder 1": 1}, ways, 3.0, ("holder 2",))
    assert Refilled.together([]) == Refilled({}, {}, 0.0)
