"""A key-value store for rendezvous, with the interface of torch's stores.

Torch's `TCPStore` needs no secret, listens on every address, and random bytes can make it stop answering.
This one accepts only clients that show its secret, and listens on one address. Waits are in the client.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
import zmq
from torch.distributed.distributed_c10d import Store
from zmq.utils.monitor import recv_monitor_message

from weightsync.config import Ports
from weightsync.errors import WireError
from weightsync.protocol.decoding import decoded, decoded_one
from weightsync.protocol.handshake import Server, dial, hang_up

MAX_MESSAGE_NBYTES = 1 << 20
_POLL_MS = 50
_WAIT_S = 0.01


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """A client's call on `keys`. The answer has the same `ticket`."""

    ticket: Annotated[int, msgspec.Meta(ge=0)]
    do: Literal["set", "get", "check", "add", "compare_set"]
    keys: tuple[str, ...]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """A key's value, or None without one; `refusal` says why nothing was done."""

    ticket: int
    value: bytes | None = None
    refusal: str = ""


_requests = msgspec.msgpack.Decoder(_Request)
_answers = msgspec.msgpack.Decoder(_Answer)


class StoreServer(Server):
    """Serves a store on a port of `ports`, or a free one; `address` is ``secret@host:port``."""

    def __init__(self, host: str, ports: Ports | None = None) -> None:
        """Raises ConfigError or TransportError as `weightsync.protocol.ports.listen`."""
        self._values: dict[str, bytes] = {}
        super().__init__(host, ports, MAX_MESSAGE_NBYTES, "no rendezvous can be served")
        self.address = f"{self.secret}@{self.endpoint.removeprefix('tcp://')}"

    def answer(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Return the answer to one request."""
        try:
            request = decoded_one(_requests.decode, frames)
            answer = _Answer(request.ticket, self._do(request))
        except WireError as error:
            answer = _Answer(0, None, str(error))
        return [msgspec.msgpack.encode(answer)]

    def _do(self, request: _Request) -> bytes | None:
        if request.do == "check":
            return b"1" if all(key in self._values for key in request.keys) else None
        if len(request.keys) != 1:
            raise WireError(f"{request.do} of {len(request.keys)} keys")
        (key,) = request.keys
        value = self._values.get(key)
        if request.do == "set":
            self._values[key] = request.value
        elif request.do == "add":
            # A number may have more digits than Python reads or writes.
            self._values[key] = decoded(
                lambda old: b"%d" % (int(old or 0) + request.amount), value, "a number"
            )
        elif request.do == "compare_set" and (value or b"") == request.expected:
            self._values[key] = request.value
        return self._values.get(key)


class NetworkStore(Store):
    """A client of the store at ``secret@host:port``. Calls exclude each other.

    They raise RuntimeError when the server is gone or does not answer within `timeout_s`.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__()
        secret, _, place = address.rpartition("@")
        self._place, self._timeout_s = place, timeout_s
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._ticket = 0
        self._context = zmq.Context()
        self._socket, self._monitor = dial(self._context, f"tcp://{place}", secret, MAX_MESSAGE_NBYTES)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._lost = False

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of `key`."""
        self._ask("set", key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait until `key` has a value, and return it."""
        self.wait([key])
        return self._ask("get", key) or b""

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` have values."""
        return self._ask("check", *keys) is not None

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number, 0 at first, and return the sum."""
        return int(self._ask("add", key, amount=amount) or 0)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set `key` if its value is `expected` (empty also means none). Returns its value then.

        Returns `expected` if it has none.
        """
        done = self._ask("compare_set", key, value=_bytes(value), expected=_bytes(expected))
        return done if done is not None else _bytes(expected)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` have values."""
        seconds = timeout.total_seconds() if timeout else self._timeout_s
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(keys)}: not set within {seconds:g} s")
            time.sleep(_WAIT_S)

    def close(self) -> None:
        """Disconnect and end a call that waits. Safe to call twice."""
        self._closing.set()
        with self._lock:
            if not self._socket.closed:
                hang_up(self._socket, self._monitor)
                self._context.term()

    def __del__(self) -> None:
        """Disconnect if `close` was not called: a broken communicator is only dropped."""
        if hasattr(self, "_monitor"):
            self.close()

    def _ask(self, do: Any, *keys: str, **values: Any) -> bytes | None:  # noqa: ANN401 - as `_Request`
        with self._lock:
            self._check()
            self._ticket += 1
            request = msgspec.msgpack.encode(_Request(self._ticket, do, keys, **values))
            try:
                self._socket.send(request, zmq.NOBLOCK)
                return self._answer(time.monotonic() + self._timeout_s)
            except zmq.Again:  # there is no connection, and none will come back
                self._lost = True
                self._check()
                raise
            except WireError as error:
                raise RuntimeError(f"the store at {self._place} failed: {error}") from error

    def _answer(self, deadline: float) -> bytes | None:
        while time.monotonic() < deadline:
            ready = dict(self._poller.poll(_POLL_MS))
            if self._socket in ready:
                answer = decoded_one(_answers.decode, self._socket.recv_multipart())
                if answer.refusal:
                    raise WireError(answer.refusal)
                if answer.ticket == self._ticket:  # otherwise of a call that was given up
                    return answer.value
            elif self._monitor in ready:
                recv_monitor_message(self._monitor)
                self._lost = True
            self._check()
        raise RuntimeError(f"the store at {self._place} does not answer within {self._timeout_s:g} s")

    def _check(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("the store is closed")
        if self._lost:
            raise RuntimeError(f"the connection to the store at {self._place} broke, or there is none")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
