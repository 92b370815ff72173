"""Calls to SGLang's processes. A call is sent in a weight update, and answered on a socket.

SGLang calls a custom weight loader in each rank's process with the data of the request, and only returns
whether the loader ran. Answers on the socket are decoded by a schema and never unpickled.
"""

from __future__ import annotations

import functools
import hmac
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import zmq

from weightsync.channel.private_socket import PrivateDirectory, own_socket
from weightsync.channel.wire import SentError
from weightsync.engines.lora.adapter_rank import AdapterRank, AdapterRanks
from weightsync.engines.rank.rank import Rank
from weightsync.errors import EngineError, WeightSyncError, WireError
from weightsync.protocol.decoding import decoded, decoded_one

logger = logging.getLogger("weightsync.engines.sglang")

_SEND_MS = 5000
_MAX_REPLY_NBYTES = 256 << 20
"""A layout of 19,000 segments takes 0.9 MB."""


@dataclass(frozen=True, slots=True)
class Call:
    """One method of one rank. Carries a secret: do not log it.

    Attributes:
        secret: sent with the answer.
        settings: the engine's, equal in all calls; the first call makes the rank from them.
        blob: the method's arguments, pickled, since they travel by SGLang's own channel.
        to_draft: it only brings the draft model, and is not answered.
    """

    endpoint: str
    secret: bytes
    number: int
    rank: int
    settings: Any
    method: str
    blob: bytes
    to_draft: bool = False


class _Reply(msgspec.Struct, frozen=True):
    """A rank's answer to call `number`: an error, or the method's result."""

    secret: bytes
    number: int
    rank: int
    error: SentError | None
    result: msgspec.Raw


class Replies:
    """The engine's end of the socket, for one thread at a time."""

    def __init__(self, engine: str, num_ranks: int) -> None:
        self._engine, self._num_ranks = engine, num_ranks
        self._numbers = itertools.count()
        self._secret = secrets.token_bytes(32)
        self._directory = PrivateDirectory()
        self.endpoint = f"ipc://{self._directory.path}/replies"
        self._socket, self._close_socket = own_socket(self, zmq.PULL, _MAX_REPLY_NBYTES)
        self._socket.bind(self.endpoint)

    def calls(self, settings: object, method: str, blob: bytes, to_draft: bool = False) -> list[Call]:
        """Make a call of `method` for each rank. `blob` has the arguments."""
        number = next(self._numbers)
        return [
            Call(self.endpoint, self._secret, number, rank, settings, method, blob, to_draft)
            for rank in range(self._num_ranks)
        ]

    def collect(self, calls: Sequence[Call], timeout_s: float, part: str = "") -> list[Any]:
        """Return the ranks' answers in order: results, or a WeightSyncError.

        `part` is the method of `AdapterRank`, if they were asked for one.

        Raises EngineError if a rank did not answer, and WireError if a result has another type than `Rank`
        returns.
        """
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(calls):
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            if not self._socket.poll(left_ms):
                missing = next(call.rank for call in calls if call.rank not in answers)
                raise EngineError(self._engine, "call", "no answer came, see its log", missing)
            try:
                reply = self._read(self._socket.recv_multipart())
            except WireError as error:
                logger.warning("[engine %s] refused an answer: %s", self._engine, error)
                continue
            if reply.number == calls[0].number:  # not a late answer to an earlier call
                answers[reply.rank] = _outcome(reply, calls[0].method, part)
        return [answers[call.rank] for call in calls]

    def connected(self) -> None:
        """Remove the socket's file, which is not needed once all ranks have answered."""
        self._directory.remove()

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._directory.remove()
        self._close_socket()

    def _read(self, frames: Sequence[bytes]) -> _Reply:
        """Decode a rank's answer. Raises WireError if `frames` are anything else."""
        reply = decoded_one(_decoder.decode, frames, "an answer of a rank")
        if not hmac.compare_digest(reply.secret, self._secret):
            raise WireError("its secret is wrong")
        if not 0 <= reply.rank < self._num_ranks:
            raise WireError(f"rank {reply.rank} of {self._num_ranks}")
        return reply


def _outcome(reply: _Reply, method: str, part: str) -> Any:  # noqa: ANN401 - as the method is annotated
    if reply.error is not None:
        return reply.error.rebuild()
    decoder = msgspec.msgpack.Decoder(_returned(method, part), dec_hook=_array)
    return decoded(decoder.decode, reply.result, f"what rank {reply.rank} returns from {method}")


@functools.cache
def _returned(method: str, part: str) -> Any:  # noqa: ANN401 - a type
    """Return the result type of a method that a `Rank` answers, or of an `AdapterRank`'s."""
    owner = Rank if hasattr(Rank, method) else AdapterRanks
    called = getattr(AdapterRank, part) if part else getattr(owner, method)
    return get_type_hints(called)["return"]


def _plain(value: object) -> object:
    """Convert arrays to dtype, shape and bytes, and NumPy's numbers to Python's."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} has no place in an answer")


def _array(kind: Any, value: object) -> object:  # noqa: ANN401 - an annotation
    """Return an array of a dtype that the annotation `kind` names, which may name several integers'."""
    (wanted,) = get_args(get_args(kind)[1])
    dtype, shape, data = msgspec.convert(value, tuple[str, tuple[int, ...], bytes])
    if not issubclass(np.dtype(dtype).type, get_origin(wanted) or wanted):
        raise TypeError(f"an array of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


_decoder = msgspec.msgpack.Decoder(_Reply)
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
sockets: dict[str, zmq.Socket[bytes]] = {}
"""The socket to the engine that started this process, by endpoint."""


def reply(call: Call, outcome: object) -> None:
    """Send the result or the error of a rank's method from the rank's process.

    Raises zmq.Again if the engine does not accept the message.
    """
    error = SentError.of(outcome) if isinstance(outcome, WeightSyncError) else None
    result = msgspec.Raw(_encoder.encode(None if error else outcome))
    if call.endpoint not in sockets:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, _SEND_MS)
        socket.connect(call.endpoint)
        sockets[call.endpoint] = socket
    answer = _Reply(call.secret, call.number, call.rank, error, result)
    sockets[call.endpoint].send(_encoder.encode(answer))
