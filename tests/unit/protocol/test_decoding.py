"""Bytes of other processes are a message, or a WireError: no other error ends a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.foreign import NASTY, foreign
from tests.unit.channel.test_wire import MESSAGES
from weightsync.channel.wire import SentError, decode, encode
from weightsync.errors import WireError
from weightsync.node.codec import decode as value_of
from weightsync.node.codec import encode as value_bytes
from weightsync.node.messages import (
    Answer,
    Ask,
    Bye,
    Drop,
    Hello,
    Notice,
    Raised,
    Refused,
    Tell,
    Welcome,
    from_node,
    to_node,
)
from weightsync.protocol.decoding import decoded, decoded_one
from weightsync.protocol.messages import LoadReport, PublishReport
from weightsync.protocol.timing import Span

WORDS = np.arange(3, dtype=np.uint64)
LOADED = LoadReport(np.arange(6, dtype=np.uint64).reshape(2, 3), [[Span("load", 1.0, 2.0)]])
PUBLISHED = PublishReport(WORDS, WORDS, {"a": 2}, [Span("publish", 1.0, 2.0)])
ERROR = SentError("DeadlineError", ["move", ["e0"], 1.0], None)
REPLIES = [
    Hello("process", frozenset({1, 2})),
    Answer(1, value_bytes(LOADED, LoadReport)),
    Raised(1, ERROR, "it broke"),
    Tell(1),
    Notice(2),
    Notice(2, value_bytes(PUBLISHED, PublishReport)),
]
ASKS = [Welcome(1.0), Refused("it is dead"), Bye(), Ask(1, "load", b"\x92\x01\x02", 2.0), Drop(1)]
VALUES: Mapping[str, tuple[Any, object]] = {
    "LoadReport": (LoadReport, LOADED),
    "PublishReport": (PublishReport, PUBLISHED),
}


def of_type(kind: Any) -> Callable[[bytes], object]:
    return lambda data: value_of(data, kind)


DECODERS: Mapping[str, tuple[Callable[[bytes], object], list[bytes]]] = {
    "feed": (decode, [encode(each) for each in MESSAGES]),
    "of nodes": (from_node, [msgspec.msgpack.encode(each) for each in REPLIES]),
    "to nodes": (to_node, [msgspec.msgpack.encode(each) for each in ASKS]),
    **{name: (of_type(kind), [value_bytes(value, kind)]) for name, (kind, value) in VALUES.items()},
}
every_decoder = pytest.mark.parametrize("name", DECODERS)


@every_decoder
def test_what_is_nasty_is_a_wire_error(name: str) -> None:
    decode, valid = DECODERS[name]
    for data in NASTY.values():
        with pytest.raises(WireError):
            decode(data)
    for data in valid:
        for nasty in NASTY.values():
            for at in range(len(data)):
                with contextlib.suppress(WireError):
                    decode(data[:at] + nasty + data[at + 1 :])


@every_decoder
@given(drawn=st.data())
@settings(max_examples=50)
def test_any_bytes_are_a_message_or_a_wire_error(name: str, drawn: st.DataObject) -> None:
    decode, valid = DECODERS[name]
    with contextlib.suppress(WireError):
        decode(drawn.draw(foreign(valid)))


@given(st.recursive(st.text(max_size=3) | st.integers(), lambda each: st.lists(each), max_leaves=5))
def test_an_error_of_any_depth_is_ours_or_a_wire_error(value: object) -> None:
    for _ in range(400):
        value = [value]
    for kind in ("ConfigError", "VerifyError", "SourceChangedError", "Exception"):
        sent = SentError(kind, [value, value, value], None)
        with contextlib.suppress(WireError):
            str(sent.rebuild())


def test_the_error_says_what_was_expected_and_why_it_is_none() -> None:
    with pytest.raises(WireError, match=r"not a number: invalid literal.*'x'"):
        decoded(int, "x", "a number")
    with pytest.raises(WireError) as told:
        decoded(int, "x" * 100_000, "a number")
    assert len(str(told.value)) < 300
    with pytest.raises(WireError, match="2 frames, where a number is 1"):
        decoded_one(int, ["1", "2"], "a number")
    assert decoded_one(int, ["1"]) == 1
