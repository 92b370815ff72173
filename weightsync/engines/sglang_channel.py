"""Calls to SGLang's processes and their answers: a call rides on a weight update, its answer on a socket.

SGLang calls a custom weight loader in each rank's process, with what came in the request, and gives
back no more than that it ran.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from weightsync.errors import EngineError
from weightsync.private_directory import PrivateDirectory

__all__ = ["Call", "Replies", "reply"]

_SEND_MS = 5000


@dataclass(frozen=True, slots=True)
class Call:
    """One method of one rank.

    Attributes:
        settings: of the engine, the same in each call: the rank is made from them at the first.
        blob: the method's name and arguments, pickled.
    """

    endpoint: str
    number: int
    rank: int
    settings: Any
    blob: bytes


class Replies:
    """The engine's end of the socket. Used by one thread at a time."""

    def __init__(self, engine: str, num_ranks: int) -> None:
        self._engine, self._num_ranks = engine, num_ranks
        self._numbers = itertools.count()
        self._directory = PrivateDirectory()
        self._endpoint = f"ipc://{self._directory.path}/replies"
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._endpoint)

    def calls(self, settings: object, method: str, args: Sequence[object]) -> list[Call]:
        """A call of `method` for each rank."""
        number, blob = next(self._numbers), pickle.dumps((method, tuple(args)))
        return [Call(self._endpoint, number, rank, settings, blob) for rank in range(self._num_ranks)]

    def collect(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        """What the ranks answered, in their order. Raises EngineError when one did not."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < len(calls):
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            if not self._socket.poll(left_ms):
                missing = next(call.rank for call in calls if call.rank not in answers)
                raise EngineError(self._engine, "call", "no answer came, see its log", missing)
            number, rank, blob = self._socket.recv_multipart()
            if int(number) == calls[0].number:  # not an earlier call's, that nobody waited for
                answers[int(rank)] = pickle.loads(blob)
        return [answers[call.rank] for call in calls]

    def connected(self) -> None:
        """All ranks have answered once: the socket's file is not needed any longer."""
        self._directory.remove()

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        self._directory.remove()
        self._context.destroy(linger=0)


_sockets: dict[str, zmq.Socket[bytes]] = {}
"""One, to the engine that started this process."""


def reply(call: Call, answer: bytes) -> None:
    """Send a rank's answer, from its process. Raises zmq.Again when the engine does not take it."""
    if call.endpoint not in _sockets:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, _SEND_MS)
        socket.connect(call.endpoint)
        _sockets[call.endpoint] = socket
    frames = [str(call.number).encode(), str(call.rank).encode(), answer]
    _sockets[call.endpoint].send_multipart(frames)
