"""Messages between a holder and an engine rank, with their encoding.

Nothing that arrives on a socket is unpickled. `decode` raises WireError for a message that is too long or of
an unknown type. A holder ignores peers that did not show the run's secret.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weightsync.errors import KINDS, WeightSyncError, Where, WireError
from weightsync.protocol.decoding import decoded

MAX_MESSAGE_NBYTES = 16 << 20
"""`Written` has digests of all tensors, perhaps of hundreds of thousands."""


class FeedHello(msgspec.Struct, frozen=True, tag="hello"):
    """Engine rank → holder, first: the run's secret, the engine's name and the engine's plan."""

    secret: bytes
    engine: str
    plan_digest: str


class FeedWelcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Holder → engine rank: the hello was accepted."""

    holder: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Holder → engine rank: `bucket` may be read from the places in the plan.

    A refill sets `whole`: the slot then has all pieces, also pieces of the holder's own trainer.
    """

    attempt: int
    bucket: int
    whole: bool = False


class GoingOn(msgspec.Struct, frozen=True, tag="going-on"):
    """Holder → engine rank, before `Written`: a bucket came, and more follow."""

    attempt: int


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Holder → engine rank: all further buckets are in the rank's memory.

    The holder has written the buckets there, or they are frozen and unchanged. If the holder digested the
    buckets, the other fields are the fields of `HolderDigests`, with arrays as bytes.
    """

    attempt: int
    wholes: bytes = b""
    stored: bytes = b""
    are_parts: bool = False


class Writable(msgspec.Struct, frozen=True, tag="writable"):
    """Engine rank → holder: from now on, you may quantise into the exported parameters.

    An update has shown that the export names the right places.
    """


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Engine rank → holder: the bucket was read; the bucket's slot may be filled again."""

    attempt: int
    bucket: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Engine rank → holder: this attempt failed; no more answers follow."""

    attempt: int
    cause: str


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Holder → engine rank: no more buckets of this attempt follow."""

    attempt: int
    cause: str


class SentError(msgspec.Struct, frozen=True):
    """One of our errors in a message: class name, arguments and origin."""

    kind: str
    args: list[Any]
    where: Where | None

    @classmethod
    def of(cls, error: WeightSyncError) -> SentError:
        """Convert an error. A class that `KINDS` lacks is sent as its nearest base in `KINDS`."""
        kind = next(each.__name__ for each in type(error).__mro__ if KINDS.get(each.__name__) is each)
        return cls(kind, [_sendable(each) for each in error.args], error.where)

    def rebuild(self) -> WeightSyncError:
        """Return the error. Raises WireError if the class or the arguments are not ours."""
        return decoded(_rebuilt, self, f"an error of ours, {self.kind!r} of {len(self.args)} values")


Message = FeedHello | FeedWelcome | Ready | GoingOn | Written | Writable | Done | Failed | Cancel

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Encode a message. Causes are cut to 4096 characters, so that messages stay below the limit."""
    if isinstance(message, Failed | Cancel):
        message = msgspec.structs.replace(message, cause=message.cause[:4096])
    data = _encoder.encode(message)
    assert len(data) <= MAX_MESSAGE_NBYTES
    return data


def decode(data: bytes) -> Message:
    """Decode a message. Raises WireError for anything else."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise WireError(f"a message of {len(data)} bytes, more than {MAX_MESSAGE_NBYTES}")
    return decoded(_decoder.decode, data)


def _rebuilt(sent: SentError) -> WeightSyncError:
    error = KINDS[sent.kind](*sent.args)
    str(error)  # raises if fields have another type
    if sent.where is not None:
        error.where = sent.where
    return error


def _sendable(value: object) -> object:
    """Return `value` if MessagePack can carry it, tuples as lists; otherwise its `repr`."""
    if isinstance(value, list | tuple):
        return [_sendable(each) for each in value]
    fits = -(1 << 63) <= value < 1 << 64 if isinstance(value, int) else isinstance(value, float | str | bytes)
    return value if fits or value is None else repr(value)
