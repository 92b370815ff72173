"""Messages on our own sockets: a schema, a limit, and never pickle."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import WireError
from weightsync.wire import MAX_MESSAGE_NBYTES, Cancel, Done, Failed, Hello, Ready, Welcome, decode, encode

MESSAGES = [
    Hello(secret=b"s" * 32, engine="e0", plan_digest="ab"),
    Welcome(holder="holder 0"),
    Ready(attempt=1, bucket=2),
    Done(attempt=1, bucket=2),
    Failed(attempt=1, cause="it broke"),
    Cancel(attempt=1, cause="it broke"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_as_it_was(message: Hello) -> None:
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
