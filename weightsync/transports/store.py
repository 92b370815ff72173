"""A key-value store for rendezvous, with the interface of torch's stores.

Torch's `TCPStore` needs no secret, listens on every address, and random bytes can make it stop answering.
This store only accepts clients that know the secret, and listens on one address. Waits are in the client.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
from torch.distributed.distributed_c10d import Store

from weightsync.config import Ports, TlsFiles
from weightsync.errors import WireError
from weightsync.protocol.decoding import decoded
from weightsync.protocol.listener import AcceptedConnection, Listener, Receive
from weightsync.protocol.ports import listen
from weightsync.protocol.stream import Stream, endpoint_of
from weightsync.protocol.tls import accepting

MAX_MESSAGE_NBYTES = 1 << 20
_POLL_S = 0.05
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
    """A key's value, or None; `refusal` is the cause if nothing was done."""

    ticket: int
    value: bytes | None = None
    refusal: str = ""


_requests = msgspec.msgpack.Decoder(_Request)
_answers = msgspec.msgpack.Decoder(_Answer)


class StoreServer:
    """Serves a store on a port of `ports`, or a free port; `address` is ``secret@host:port``."""

    def __init__(self, host: str, ports: Ports | None = None, tls: TlsFiles | None = None) -> None:
        """Raises ConfigError or TransportError, as `accepting` and `weightsync.protocol.ports.listen`."""
        self._tls = accepting(tls) if tls else None
        listening = listen(host, ports, "no rendezvous can be served")
        self._secret, self._values = secrets.token_hex(32), dict[str, bytes]()
        self.address = f"{self._secret}@{endpoint_of(listening).removeprefix('tcp://')}"
        self._loop, self._ending = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(listening,), daemon=True, name="weightsync-store"
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
            self._loop.close()

    def answer(self, data: bytes) -> bytes:
        """Return the answer to one request."""
        try:
            request = decoded(_requests.decode, data)
            answer = _Answer(request.ticket, self._do(request))
        except WireError as error:
            answer = _Answer(0, None, str(error))
        return msgspec.msgpack.encode(answer)

    def _serve(self, listening: socket.socket) -> None:
        async def serve() -> None:
            listener = Listener(listening, self._admit, MAX_MESSAGE_NBYTES, self._tls)
            listener.secrets.add(self._secret)
            await self._ending.wait()
            await listener.close()

        self._loop.run_until_complete(serve())

    def _admit(self, connection: AcceptedConnection, secret: str) -> Receive:
        def receive(data: bytes) -> None:
            connection.send(self.answer(data))

        return receive

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

    Calls raise RuntimeError if the server is gone or does not answer within `timeout_s`.
    """

    def __init__(self, address: str, timeout_s: float, tls: TlsFiles | None = None) -> None:
        super().__init__()
        self._tls = tls
        self._secret, _, self._place = address.rpartition("@")
        self._timeout_s = timeout_s
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._ticket = 0
        self._stream: Stream | None = None
        self._lost = False
        self._gone = f"the connection to the store at {self._place} broke, or there is none"

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of `key`."""
        self._ask("set", key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value of `key`, and return the value."""
        return self._await("get", [key])

    def check(self, keys: list[str]) -> bool:
        """Return True if all of `keys` have values."""
        return self._ask("check", *keys) is not None

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number, 0 at first, and return the sum."""
        return int(self._ask("add", key, amount=amount) or 0)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set `key` if the value is `expected` (empty also means no value). Returns the value afterwards.

        Returns `expected` if `key` has no value.
        """
        done = self._ask("compare_set", key, value=_bytes(value), expected=_bytes(expected))
        return done if done is not None else _bytes(expected)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of `keys` have values."""
        self._await("check", keys, timeout)

    def close(self) -> None:
        """Disconnect and end a call that waits. Safe to call twice."""
        self._closing.set()
        with self._lock:
            if self._stream:
                self._stream.close()

    def __del__(self) -> None:
        """Disconnect if `close` was not called: a broken communicator is only dropped."""
        if hasattr(self, "_lost"):
            self.close()

    def _await(self, do: str, keys: list[str], timeout: timedelta | None = None) -> bytes:
        """Ask until there is an answer."""
        seconds = timeout.total_seconds() if timeout else self._timeout_s
        deadline = time.monotonic() + seconds
        while (answer := self._ask(do, *keys)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(keys)}: not set within {seconds:g} s")
            time.sleep(_WAIT_S)
        return answer

    def _ask(self, do: Any, *keys: str, **values: Any) -> bytes | None:  # noqa: ANN401 - as `_Request`
        with self._lock:
            self._check()
            self._ticket += 1
            request = msgspec.msgpack.encode(_Request(self._ticket, do, keys, **values))
            try:
                return self._answer(request, time.monotonic() + self._timeout_s)
            except OSError as error:  # another process may have the port by now
                self._lost = True
                raise RuntimeError(self._gone) from error
            except WireError as error:
                raise RuntimeError(f"the store at {self._place} failed: {error}") from error

    def _answer(self, request: bytes, deadline: float) -> bytes | None:
        if self._stream is None:
            where, limits = f"tcp://{self._place}", (MAX_MESSAGE_NBYTES, self._timeout_s)
            self._stream = Stream(where, self._secret, *limits, self._tls)
        self._stream.send(request)
        while time.monotonic() < deadline:
            if (data := self._stream.receive(_POLL_S)) is not None:
                answer = decoded(_answers.decode, data)
                if answer.refusal:
                    raise WireError(answer.refusal)
                if answer.ticket == self._ticket:  # otherwise the answer to an abandoned call
                    return answer.value
            self._check()
        raise RuntimeError(f"the store at {self._place} does not answer within {self._timeout_s:g} s")

    def _check(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("the store is closed")
        if self._lost:
            raise RuntimeError(self._gone)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
