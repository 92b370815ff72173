"""Accepts connections of processes that know a secret, on an event loop.

See `weightsync.protocol.stream` for their messages, and for the end that dials.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

from weightsync.errors import WireError
from weightsync.protocol.descriptors import shortage
from weightsync.protocol.proof import PROOF_NBYTES, Secrets
from weightsync.protocol.routes import joined
from weightsync.protocol.stream import Splitter, endpoint_of, framed, keep_alive
from weightsync.protocol.tls import refusal

logger = logging.getLogger("weightsync.protocol")

_PAUSE_S = 1.0
"""How long nobody is accepted once this process has no descriptor left: to try again at once would spin."""
HANDSHAKE_S = 5.0
"""A process that has not proven a secret after this time is disconnected, which frees its descriptor."""
_SAY_S = 60.0
"""How long nothing more is said of pauses, or of processes that are refused."""
_TLS_RECORD = b"\x16\x03"
"""The first bytes of a process that speaks TLS."""

Receive: TypeAlias = Callable[[bytes], None]
"""Takes a message of a connection. Raises WireError to hang up."""


class Listener:
    """Accepts connections until `close`. Used on the event loop on which it was made.

    Attributes:
        secrets: the secrets of processes that may connect.
    """

    def __init__(
        self,
        listening: socket.socket,
        admit: Callable[[AcceptedConnection, str], Receive],
        max_nbytes: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            listening: as `weightsync.protocol.ports.listen` returns it. `close` closes it.
            admit: returns the receiver of a connection's messages, by the secret that the peer knows.
            max_nbytes: limit for each message after the proof.
            tls: as `weightsync.protocol.tls.accepting` returns it, to speak TLS.
        """
        self.endpoint = endpoint_of(listening)
        self.admit, self.max_nbytes, self.secrets = admit, max_nbytes, Secrets()
        self.connections: set[AcceptedConnection] = set()
        self._listening, self._tls, self._loop = listening, tls, asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._said_s = self._refused_s = -_SAY_S
        self._resume()

    async def close(self) -> None:
        """Stop listening, and hang up."""
        self._loop.remove_reader(self._listening)
        if self._again:
            self._again.cancel()
        self._listening.close()
        for opening in self._opening:
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in self.connections:
            connection.abort()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    def _resume(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            connection, (host, port, *_) = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        connection.setblocking(False)
        peer = joined(host, port)
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(
                lambda: AcceptedConnection(self, peer),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls else None,
            )
        )
        self._opening.add(opening)
        opening.add_done_callback(partial(self._opened, peer, connection))

    def _opened(self, peer: str, connection: socket.socket, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if opening.cancelled():  # before a transport owned the socket
            connection.close()
        error = None if opening.cancelled() else opening.exception()
        if isinstance(error, OSError) and not isinstance(error, ConnectionResetError):
            self.refuse(peer, refusal(error))

    def refuse(self, peer: str, why: str) -> None:
        """Log that `peer`, an address, is refused, as a warning once a minute."""
        is_new = self._loop.time() - self._refused_s >= _SAY_S
        logger.log(
            logging.WARNING if is_new else logging.DEBUG,
            "a process at %s that dials %s is refused: %s",
            *(peer, self.endpoint, why),
        )
        if is_new:
            self._refused_s = self._loop.time()

    def _pause(self, error: OSError) -> None:
        self._loop.remove_reader(self._listening)
        self._again = self._loop.call_later(_PAUSE_S, self._resume)
        if self._loop.time() - self._said_s >= _SAY_S:
            self._said_s = self._loop.time()
            logger.warning(
                "a process that dials %s has to wait: %s", self.endpoint, shortage() or error.strerror
            )


class AcceptedConnection(asyncio.Protocol):
    """A connection that was accepted.

    Attributes:
        when_lost: called once the connection is lost, if the secret was right.
    """

    def __init__(self, listener: Listener, peer: str) -> None:
        """`peer`: the address of the process that has dialled."""
        self._listener, self._peer = listener, peer
        self._messages = Splitter(PROOF_NBYTES)
        self._receive: Receive | None = None
        self.when_lost: Callable[[], None] = _nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        keep_alive(self._transport.get_extra_info("socket"))
        self._listener.connections.add(self)
        self._limit = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._messages.feed(data):
                if self._receive:
                    self._receive(message)
                elif not self._admitted(message):
                    return
        except WireError as error:
            if self._receive:
                logger.warning("a process is disconnected: %s", error)
            elif data.startswith(_TLS_RECORD):
                self._listener.refuse(self._peer, "it speaks TLS: set sync.tls here, or do not set it there")
            else:
                self._listener.refuse(self._peer, "its first message is no proof of a secret")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        self._listener.connections.discard(self)
        self.when_lost()

    def send(self, data: bytes) -> bool:
        """Send one message. Returns False if the process has hung up."""
        if self._transport.is_closing():
            return False
        self._transport.write(framed(data))
        return True

    def hang_up(self) -> None:
        """Hang up, once pending messages are sent."""
        self._transport.close()

    def abort(self) -> None:
        """Hang up, without sending pending messages."""
        self._transport.abort()

    def _admitted(self, proof: bytes) -> bool:
        if not (secret := self._listener.secrets.proven(proof)):
            self._listener.refuse(self._peer, "it proves no secret of this run, or one that was used before")
            self._transport.abort()
            return False
        self._receive = self._listener.admit(self, secret)
        self._limit.cancel()
        self._messages.max_nbytes = self._listener.max_nbytes
        return True


def _nothing() -> None:
    """Do nothing: nobody waits for the end."""
