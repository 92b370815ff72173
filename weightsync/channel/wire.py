"""The messages between a holder and its engine's worker, and how their bytes are read.

Nothing that arrives on a socket is unpickled. A message that is too long, of no known type, or
from a peer that has not shown the run's secret raises WireError, and the receiver goes on.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weightsync.errors import KINDS, WeightSyncError, Where, WireError

__all__ = [
    "MAX_MESSAGE_NBYTES",
    "Cancel",
    "Done",
    "Failed",
    "GoingOn",
    "Hello",
    "Message",
    "Ready",
    "SentError",
    "Welcome",
    "Written",
    "decode",
    "encode",
]

MAX_MESSAGE_NBYTES = 64 << 10


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Engine rank → holder, first: who is there, and the proof that it belongs to this run."""

    secret: bytes
    engine: str
    plan_digest: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Holder → engine rank: the hello was good."""

    holder: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Holder → engine rank: bucket `bucket` of this attempt may be read; the plan says where it lies.

    In a refill it is `whole`: also what the holder's own trainer sent lies in the slot.
    """

    attempt: int
    bucket: int
    whole: bool = False


class GoingOn(msgspec.Struct, frozen=True, tag="going-on"):
    """Holder → engine rank whose memory it writes: a bucket came, and others are still to come."""

    attempt: int


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Holder → engine rank: every bucket of this attempt lies in the memory that the rank exported."""

    attempt: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Engine rank → holder: the bucket was read, its slot may be filled again."""

    attempt: int
    bucket: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Engine rank → holder: this attempt ended early, expect no more answers."""

    attempt: int
    cause: str


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Holder → engine rank: no more buckets will come for this attempt."""

    attempt: int
    cause: str


class SentError(msgspec.Struct, frozen=True):
    """An error of ours in a message: its class by name, what it was made from, and where it happened."""

    kind: str
    args: list[Any]
    where: Where | None

    @classmethod
    def of(cls, error: WeightSyncError) -> SentError:
        """A class that `KINDS` lacks travels as the nearest of its bases that is there."""
        kind = next(each.__name__ for each in type(error).__mro__ if KINDS.get(each.__name__) is each)
        return cls(kind, [_sendable(each) for each in error.args], error.where)

    def rebuild(self) -> WeightSyncError:
        """The error. Raises WireError when it is none of ours."""
        try:
            error = KINDS[self.kind](*self.args)
            str(error)  # fields of another type do not make a text
        except (KeyError, TypeError, ValueError) as cause:
            raise WireError(f"not an error of ours: {self.kind!r} of {len(self.args)} values") from cause
        if self.where is not None:
            error.where = self.where
        return error


Message = Hello | Welcome | Ready | GoingOn | Written | Done | Failed | Cancel

_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Message to bytes; texts are cut so that the limit holds."""
    if isinstance(message, Failed | Cancel):
        message = msgspec.structs.replace(message, cause=message.cause[:4096])
    data = _encoder.encode(message)
    assert len(data) <= MAX_MESSAGE_NBYTES
    return data


def decode(data: bytes) -> Message:
    """Bytes to message. Raises WireError for anything that is not one of ours."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise WireError(f"a message of {len(data)} bytes, more than {MAX_MESSAGE_NBYTES}")
    try:
        message: Message = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of ours: {error}") from error
    return message


def _sendable(value: object) -> object:
    """`value` where MessagePack keeps it as it is, a list for a tuple, else its text."""
    if isinstance(value, list | tuple):
        return [_sendable(each) for each in value]
    fits = -(1 << 63) <= value < 1 << 64 if isinstance(value, int) else isinstance(value, float | str | bytes)
    return value if fits or value is None else repr(value)
