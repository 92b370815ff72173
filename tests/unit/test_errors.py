from __future__ import annotations

import pickle

import pytest

from weightsync import errors
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    MovedError,
    NonfiniteError,
    PeerError,
    PeerLostError,
    PlanError,
    RankLostError,
    ReadError,
    ReplicasDifferError,
    RestartedError,
    SlowError,
    SourceChangedError,
    StateError,
    StoreError,
    TransportError,
    VerifyError,
    WeightSyncError,
    Where,
    WireError,
    nearest,
)

EXAMPLES = [
    (WeightSyncError("broken"), "broken"),
    (ConfigError("sync.mode", "x", "valid: auto"), "sync.mode: 'x' is not valid; valid: auto"),
    (ConfigError("a", 1, "give 2", "x.yaml:3"), "x.yaml:3: a: 1 is not valid; give 2"),
    (PlanError("lm_head.weight", "no trainer holds it"), "lm_head.weight: no trainer holds it"),
    (StateError("connect first"), "connect first"),
    (MovedError("trainer 0: w is elsewhere"), "trainer 0: w is elsewhere"),
    (DeadlineError("move", ["e0", "e1"], 2.5), "move: no answer within 2.5 s from e0, e1"),
    (
        SlowError("reading of bucket 3", ["engine e0"], 3),
        "reading of bucket 3: no answer within 3 s from engine e0",
    ),
    (PeerLostError("holder 3", "killed"), "holder 3 is gone: killed"),
    (RestartedError("trainer 0"), "trainer 0 is gone: Ray started its actor again: call connect()"),
    (PeerError("trainer 0", "KeyError: 'w'"), "trainer 0 failed: KeyError: 'w'"),
    (TransportError("short read"), "short read"),
    (ReadError("holder 3", "its connection broke"), "holder 3 could not be read: its connection broke"),
    (StoreError("s3://b", "objects/a", "it is torn", 7), "s3://b: objects/a of version 7: it is torn"),
    (WireError("too long"), "too long"),
    (EngineError("e0", "verify", "out of memory"), "engine e0 failed in verify: out of memory"),
    (EngineError("e0", "load", "a bad bucket", 2), "engine e0, rank 2, failed in load: a bad bucket"),
    (RankLostError("e0", "watch", "killed", 1), "engine e0, rank 1, is lost: killed"),
    (VerifyError("e0", 7, ["a", "b"]), "engine e0, version 7: wrong bytes in a, b"),
    (
        NonfiniteError(7, [("a", 3), ("b", 1)]),
        "version 7: NaN or Inf in a (3), b (1), elements counted",
    ),
    (
        SourceChangedError(7, [("trainer 0", ["a", "b"]), ("trainer 1", "cdef")]),
        "version 7: trainer 0 wrote a, b while it was read; trainer 1 wrote c, d, e and 1 more while it was "
        "read; leave weights as they are until the call that moves them returns",
    ),
    (
        ReplicasDifferError(7, [("trainer 0", "ab"), ("trainer 1", "ab"), ("trainer 5", "cdef")]),
        "version 7: trainers that hold the same part of a tensor hold different bytes: trainer 0, trainer 1 "
        "in a, b; trainer 5 in c, d, e and 1 more; give all of them the same weights, by one checkpoint or a "
        "broadcast from one rank",
    ),
    (
        SourceChangedError(0, (), ["/m/1.safetensors"]),
        "/m/1.safetensors changed since the checkpoint was first read; once its files stay as they are, "
        "publish it again, or unregister and register it again",
    ),
    (
        SourceChangedError(3, [("another process", ["a"])], ["/m/1.safetensors"]),
        "version 3: another process wrote a while it was read; /m/1.safetensors changed since the checkpoint "
        "was first read; once its files stay as they are, publish it again, or unregister and register it "
        "again",
    ),
    (
        ConfigError("files", "x" * 10**5, "shorten it"),
        f"files: '{'x' * 199}… (100002 characters) is not valid; shorten it",
    ),
]


@pytest.mark.parametrize(("error", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_error_survives_pickling_with_its_fields_and_message(
    error: WeightSyncError, message: str
) -> None:
    rebuilt = pickle.loads(pickle.dumps(error))
    assert type(rebuilt) is type(error)
    assert vars(rebuilt) == vars(error)
    assert rebuilt.args == error.args
    assert str(rebuilt) == str(error) == message


def test_where_an_engine_failed_survives_pickling() -> None:
    error = PeerLostError("engine e0", "killed")
    error.where = Where("e0", 1, 8, "move")
    rebuilt = pickle.loads(pickle.dumps(error))
    assert rebuilt.where == error.where
    assert str(rebuilt.where) == "engine e0, rank 1, version 8, move"
    assert str(Where("e0", None, 0, "layout")) == "engine e0, layout", "no version is known yet"


def test_the_examples_cover_every_error() -> None:
    assert {type(error) for error, _ in EXAMPLES} == set(errors.KINDS.values())


def test_every_error_is_caught_as_ours_and_as_pythons() -> None:
    assert all(issubclass(type(error), WeightSyncError) for error, _ in EXAMPLES)
    pythons = {
        ConfigError: ValueError,
        PlanError: ValueError,
        StateError: RuntimeError,
        DeadlineError: TimeoutError,
    }
    assert all(issubclass(ours, theirs) for ours, theirs in pythons.items())


def test_iterables_become_tuples() -> None:
    assert DeadlineError("move", iter(["e0"]), 1.0).missing == ("e0",)
    assert VerifyError("e0", 7, (name for name in "abcde")).tensors == tuple("abcde")


def test_a_verify_error_shows_three_tensors_and_counts_the_rest() -> None:
    assert str(VerifyError("e0", 7, "abcde")).endswith("wrong bytes in a, b, c and 2 more")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("broadcst", "did you mean 'broadcast'? valid: auto, broadcast"),
        ("zzz", "valid: auto, broadcast"),
    ],
)
def test_nearest(word: str, remedy: str) -> None:
    assert nearest(word, ["broadcast", "auto"]) == remedy


def test_a_name_that_begins_so_is_nearer_than_one_that_resembles() -> None:
    assert nearest("qwen3-30b", ["qwen3-8b", "qwen3-30b-a3b"]).startswith("did you mean 'qwen3-30b-a3b'?")
