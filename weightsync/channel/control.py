"""A control channel: a driver's calls to one process over a socket, and the process's end.

While engines do not serve, an update makes three calls in a row. A call through Ray takes one to two
milliseconds; benchmarks/README.md compares both ways.

Messages are MessagePack, decoded by the types of `CALLS`; nothing is unpickled. A process that dials must
show the secret of its offer. A holder that calls the other holders of a host acts as their driver here, on
separate channels.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from weightsync.channel.wire import SentError
from weightsync.errors import SlowError, WeightSyncError
from weightsync.protocol.decoding import decoded
from weightsync.protocol.messages import (
    LoadReport,
    Moved,
    PublishReport,
    PublishTask,
    Refilled,
    Snapshot,
    UpdateTask,
)
from weightsync.protocol.stream import Stream

logger = logging.getLogger("weightsync.channel.control")

MAX_FRAME_NBYTES = 1 << 20
_ENVELOPE_NBYTES = 64
_LOOK_S = 1.0
"""Seconds between checks of a process for a newer channel."""
_SEND_S = 10.0
"""Time for a process to connect, and for the driver to make room for an answer."""


class ControlOffer(msgspec.Struct, frozen=True):
    """The driver's endpoint, and a secret for one process. Do not log the secret.

    Every process has a different secret, by which the driver knows the process.
    """

    endpoint: str
    secret: str

    def __repr__(self) -> str:
        return f"ControlOffer(endpoint={self.endpoint!r})"


@dataclass(frozen=True, slots=True)
class Call:
    """Types of a method's arguments and answer."""

    args: Any
    answer: Any


HostTasks: TypeAlias = tuple[tuple[bool, UpdateTask, tuple[int, ...]], ...]
"""Tasks of a host's holders: whether they feed engine ranks, the task, and the holders with this task."""

HostMoved: TypeAlias = tuple[dict[int, Moved], dict[int, SentError], tuple[int, ...]]
"""Outcomes and errors by holder, and the holders that could not be called."""

CALLS: Mapping[str, Call] = {
    "move": Call(tuple[int, bool, UpdateTask, float], Moved),
    "refill": Call(tuple[int, Snapshot, bool, float, float], Refilled),
    "pause": Call(tuple[str, float], None),
    "load": Call(tuple[int, float], LoadReport),
    "resume": Call(tuple[int], None),
    "publish_all": Call(
        tuple[PublishTask, tuple[int, ...], float], tuple[dict[int, PublishReport], dict[int, SentError]]
    ),
    "move_all": Call(tuple[int, HostTasks, float], HostMoved),
    "moved": Call(tuple[()], HostMoved),
    "readable": Call(tuple[int], bool),
    "publish_in_place": Call(tuple[PublishTask, int], PublishReport | None),
}
"""The methods of `HolderPeer` and `EnginePeer` that are called while an engine does not serve.

One holder of a host answers `publish_all`, `move_all` and `moved` for the host. `publish_all` takes the task,
the trainers' tickets and a deadline, and returns reports and errors by rank. `move_all` begins an attempt of
the host's holders. Both `move_all` and `moved` return the new outcomes and errors.

A trainer answers `readable` and `publish_in_place`, before or instead of `publish`. Both take the ticket of
`publish`. `readable` returns whether holders may read the weights already. If they may, `publish_in_place` is
called with the task. It returns None if the report is too long for a frame: Ray then brings the report.
"""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Driver → process: call `method`. An empty `method` hangs up."""

    ticket: int
    method: str
    args: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Process → driver: the call of `ticket` returned `value`."""

    ticket: int
    value: msgspec.Raw


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """Process → driver: the call of `ticket` raised `error`, or, if not a WeightSyncError, `text`."""

    ticket: int
    error: SentError | None
    text: str = ""


class Readable(msgspec.Struct, frozen=True, tag="readable"):
    """Trainer → driver: holders may read the weights of `publish` number `ticket` in place."""

    ticket: int


class Published(msgspec.Struct, frozen=True, tag="published"):
    """Trainer → driver: `publish` returned this `PublishReport`. Ray's answer takes longer."""

    ticket: int
    report: msgspec.Raw


Reply: TypeAlias = Answer | Raised | Readable | Published
"""Messages from a process to the driver."""

_asks = msgspec.msgpack.Decoder(Ask)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_reply(data: bytes) -> Reply:
    """Decode a process's message to the driver. Raises WireError for anything else."""
    return decoded(_replies.decode, data)


def pack(value: object) -> msgspec.Raw:
    """Encode arguments or an answer."""
    return msgspec.Raw(_encoder.encode(value))


def fits(value: object) -> bool:
    """Return True if `value` as an answer fits in a frame."""
    return len(pack(value)) < MAX_FRAME_NBYTES - _ENVELOPE_NBYTES


def unpack(data: msgspec.Raw, kind: Any) -> Any:  # noqa: ANN401 - an instance of `kind`
    """Decode a value of type `kind`. Raises WireError for anything else."""
    return decoded(_decoder(kind).decode, data, "a value of ours")


class Turns:
    """Numbers the channels of one process, so that late calls by an earlier channel are ignored."""

    def __init__(self) -> None:
        self._lock, self._newest = threading.Lock(), 0

    def begin(self) -> Callable[[], bool]:
        """Begin a channel. Returns a function that returns True while no newer channel began."""
        with self._lock:
            self._newest = turn = self._newest + 1
        return lambda: self._newest == turn


def answer_calls(
    offer: ControlOffer,
    methods: Mapping[str, Callable[..., object]],
    is_newest: Callable[[], bool] = lambda: True,
) -> None:
    """Answer the driver's calls of `methods`, one at a time, until the connection is lost.

    Also ends if the driver hangs up or opens a newer channel, see `Turns`: the driver has then given up its
    calls on this channel. Raises WireError for a message that is not a call.
    """
    try:
        with closing(Stream(offer.endpoint, offer.secret, MAX_FRAME_NBYTES, _SEND_S)) as stream:
            while is_newest():
                message = stream.receive(_LOOK_S)
                if message is None or not is_newest():
                    continue
                ask = decoded(_asks.decode, message)
                if not ask.method:
                    return
                stream.send(msgspec.msgpack.encode(_reply(ask, methods)))
    except OSError as error:
        logger.debug("a control channel ends: %s", error)


def _reply(ask: Ask, methods: Mapping[str, Callable[..., object]]) -> Answer | Raised:
    try:
        args = unpack(ask.args, CALLS[ask.method].args)
        return Answer(ask.ticket, pack(methods[ask.method](*args)))
    except WeightSyncError as error:
        return Raised(ask.ticket, SentError.of(error))
    except Exception as error:  # the driver waits for an answer, and calls it a PeerError, as with Ray
        logger.exception("%s() failed", ask.method)
        return Raised(ask.ticket, None, f"{type(error).__name__}: {error}")


def _encoded(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.shape, value.astype("<u8", casting="equiv").tobytes()
    if isinstance(value, SlowError):
        return SentError.of(value)
    raise TypeError(f"a control channel does not carry {type(value).__name__}")


def _decoded(kind: type, value: Any) -> object:  # noqa: ANN401 - what MessagePack has
    if kind is SlowError:
        error = msgspec.convert(value, SentError).rebuild()
        if isinstance(error, SlowError):
            return error
    elif getattr(kind, "__origin__", kind) is np.ndarray:
        shape, data = msgspec.convert(value, tuple[tuple[int, ...], bytes])
        return np.frombuffer(data, "<u8").reshape(shape)
    raise ValueError(f"not a {kind.__name__}")  # msgspec makes a ValidationError of it


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:  # noqa: ANN401 - a type of `CALLS`
    return msgspec.msgpack.Decoder(kind, dec_hook=_decoded)
