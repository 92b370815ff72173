"""Messages on our own sockets: a schema, a limit, and never pickle."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_errors import EXAMPLES
from weightsync.channel.wire import (
    MAX_MESSAGE_NBYTES,
    Cancel,
    Done,
    Failed,
    FeedHello,
    FeedWelcome,
    Ready,
    SentError,
    Writable,
    Written,
    decode,
    encode,
)
from weightsync.errors import (
    KINDS,
    ConfigError,
    StateError,
    WeightSyncError,
    Where,
    WireError,
)

MESSAGES = [
    FeedHello(secret=b"s" * 32, engine="e0", plan_digest="ab"),
    FeedWelcome(holder="holder 0"),
    Ready(attempt=1, bucket=2),
    Done(attempt=1, bucket=2),
    Written(attempt=1, wholes=b"12345678", stored=b""),
    Writable(),
    Failed(attempt=1, cause="it broke"),
    Cancel(attempt=1, cause="it broke"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_as_it_was(message: FeedHello) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(data)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    trap = pickle.dumps(Trap())
    with pytest.raises(WireError):
        decode(trap)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()  # the trap works: it was decode() that did not spring it


def test_a_message_over_the_limit_is_refused_and_a_long_cause_is_cut() -> None:
    with pytest.raises(WireError, match="more than"):
        decode(b"\x00" * (MAX_MESSAGE_NBYTES + 1))
    assert len(encode(Failed(attempt=1, cause="x" * 10 * MAX_MESSAGE_NBYTES))) < MAX_MESSAGE_NBYTES


def test_a_message_with_a_field_of_another_type_is_refused() -> None:
    assert b"ready" in encode(Ready(attempt=1, bucket=2))
    with pytest.raises(WireError):
        decode(encode(Ready(attempt="one", bucket=2)))  # type: ignore[arg-type]


def travelled(error: WeightSyncError) -> WeightSyncError:
    """What arrives of `error`."""
    sent = msgspec.msgpack.encode(SentError.of(error))
    return msgspec.msgpack.decode(sent, type=SentError).rebuild()


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES], ids=lambda error: type(error).__name__)
def test_an_error_travels_with_its_class_its_fields_and_its_message(error: WeightSyncError) -> None:
    error.where = Where("e0", 1, 8, "move")
    arrived = travelled(error)
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert str(arrived) == str(error)


def test_a_value_without_a_form_on_the_wire_travels_as_its_text() -> None:
    assert str(travelled(ConfigError("a", Path("b"), "give c"))).endswith("is not valid; give c")
    assert travelled(ConfigError("a", 1 << 70, "less")).value == str(1 << 70)
    assert travelled(ConfigError("a", [1, ("b",)], "less")).value == [1, ["b"]]


def test_a_class_that_only_one_side_knows_travels_as_its_base() -> None:
    class OwnError(StateError): ...

    class EngineError(StateError): ...  # a name of ours alone does not make it ours

    for own in (OwnError, EngineError):
        arrived = travelled(own("connect first"))
        assert type(arrived) is StateError
        assert str(arrived) == "connect first"


@pytest.mark.parametrize(
    "sent",
    [
        SentError("KeyError", ["w"], None),
        SentError("SystemExit", [3], None),
        SentError("EngineError", ["e0"], None),
        SentError("DeadlineError", ["move", 5, 1.0], None),
        SentError("DeadlineError", ["move", ["e0"], "soon"], None),
    ],
    ids=lambda sent: f"{sent.kind} {sent.args}",
)
def test_what_is_no_error_of_ours_is_a_wire_error(sent: SentError) -> None:
    with pytest.raises(WireError, match="not an error of ours"):
        sent.rebuild()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(KINDS)), st.lists(VALUES, max_size=5))
def test_any_values_make_an_error_of_ours_or_a_wire_error(kind: str, args: list[object]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(SentError(kind, args, None).rebuild(), KINDS[kind])
