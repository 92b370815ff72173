"""Reads a peer's memory over ZeroMQ, in chunks requested one by one. Way "curve" encrypts them.

Only the reading thread copies bytes into a target, so no byte is written after the end of a read."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from weightsync.config import Ports
from weightsync.errors import DeadlineError, ReadError, WireError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.decoding import decoded_one
from weightsync.protocol.handles import Offer
from weightsync.readers.base import ClosableReader, Read, by_peer, pieces
from weightsync.readers.ways import ENCRYPTED
from weightsync.readers.zeromq_handshake import dial, hang_up
from weightsync.readers.zeromq_server import CHUNK_NBYTES, Request, SharedMemory, ZeroMqServer, answers

WINDOW = 4
"""Chunks requested from one peer at a time."""
MAX_IO_THREADS = 4
EVENT_MS = 1000
"""Time that a send without a connection waits for the event with the cause."""
_BROKE = "its connection broke"
_CAUSES: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: _BROKE,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the secret is wrong",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what answers there is no server of ours",
}


class ZeroMqReader(ClosableReader):
    """The reader of ways "zeromq" and "curve": one connection per peer, read in one thread."""

    def __init__(self, targets: Sequence[SharedBuffer], offers: Mapping[str, Offer]) -> None:
        self.ways = {peer: offer.protocol for peer, offer in offers.items()}
        self._targets = [target.tensor.numpy() for target in targets]
        context = zmq.Context(io_threads=max(1, min(MAX_IO_THREADS, len(offers))))
        self._peers = {peer: _Peer(context, peer, offer) for peer, offer in offers.items()}
        # Python's collector of garbage would end the context first, and wait for its sockets forever.
        self._hang_up = weakref.finalize(self, _hang_up, [*self._peers.values()], context)
        self._hang_up.atexit = False  # a thread may still read
        super().__init__()
        self._poller = zmq.Poller()
        self._poller.register(self.fd, zmq.POLLIN)
        for peer in self._peers.values():
            self._poller.register(peer.socket, zmq.POLLIN)
            self._poller.register(peer.monitor, zmq.POLLIN)

    def read(self, reads: Sequence[Read], timeout_s: float) -> dict[str, int]:
        """Run `reads`, as `Reader.read` says."""
        deadline = time.monotonic() + timeout_s
        with self.reading():
            found = by_peer(reads)
            peers = [self._peers[name] for name in found]
            for peer in peers:
                peer.begin(found[peer.name])
            while waited := [peer for peer in peers if peer.owes]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError("refill", sorted(peer.name for peer in waited), timeout_s)
                ready = dict(self._poller.poll(math.ceil(left * 1e3)))
                self.check()
                for peer in self._peers.values():
                    if peer.socket in ready:
                        peer.receive(self._targets)
                    elif peer.monitor in ready:
                        peer.heed()
            return {name: sum(read.nbytes for read in its) for name, its in found.items()}

    def _release(self) -> None:
        self._hang_up()
        self._targets.clear()


def _hang_up(peers: Sequence[_Peer], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    for peer in peers:
        peer.close()
    context.term()


class _Peer:
    """One connection and the reads that are not done yet."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str, offer: Offer) -> None:
        self.name = name
        self._todo: deque[Read] = deque()
        self._asked: dict[int, Read] = {}
        self._ticket = 0
        self._lost = ""
        self.socket, self.monitor = dial(
            context, offer.endpoint, offer.secret, CHUNK_NBYTES, encrypts=offer.protocol == ENCRYPTED
        )

    @property
    def owes(self) -> bool:
        return bool(self._asked or self._todo)

    def begin(self, reads: Sequence[Read]) -> None:
        self._todo.extend(pieces(reads, CHUNK_NBYTES))
        self._check()
        for _ in range(WINDOW):
            self._ask()

    def receive(self, targets: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy one answer into the target, and request the next chunk."""
        head, *data = self.socket.recv_multipart(copy=False)
        try:
            answer = decoded_one(answers.decode, [head.buffer])
        except WireError as error:
            raise ReadError(self.name, str(error)) from error
        if answer.refusal:
            raise ReadError(self.name, f"it refused: {answer.refusal}")
        wanted = self._asked.pop(answer.ticket, None)
        if wanted is None or len(data) != 1:
            raise ReadError(self.name, "it answered what it was not asked")
        if len(data[0]) != wanted.nbytes:
            raise ReadError(self.name, f"it sent {len(data[0])} bytes where {wanted.nbytes} were asked for")
        self._ask()
        source = np.frombuffer(data[0].buffer, dtype=np.uint8)
        np.copyto(targets[wanted.target][wanted.offset : wanted.offset + wanted.nbytes], source)

    def heed(self) -> None:
        """Record a lost connection. Raises ReadError if reads are not done yet."""
        self._lost = self._lost or self._cause()
        self._check()

    def close(self) -> None:
        hang_up(self.socket, self.monitor)

    def _check(self) -> None:
        if self._lost and self.owes:
            raise ReadError(self.name, self._lost)

    def _ask(self) -> None:
        if self._todo:
            wanted = self._todo.popleft()
            self._ticket += 1
            self._asked[self._ticket] = wanted
            request = Request(self._ticket, wanted.source, wanted.nbytes)
            try:
                self.socket.send(msgspec.msgpack.encode(request), zmq.NOBLOCK)
            except zmq.Again as error:  # there is no connection, and none will come back
                lost = self._lost or (self._cause() if self.monitor.poll(EVENT_MS) else _BROKE)
                raise ReadError(self.name, lost) from error

    def _cause(self) -> str:
        event: int = recv_monitor_message(self.monitor)["event"]
        return _CAUSES.get(event, "no process answers there")


READER = ZeroMqReader


def serve(
    buffer: SharedBuffer, holder: str, host: str, protocol: str, rdma_device: str, ports: Ports | None
) -> ZeroMqServer:
    """Serve `buffer`. `rdma_device` is not used."""
    return ZeroMqServer(SharedMemory(buffer), buffer.handle, holder, host, ports, protocol)


def absence(protocol: str) -> str:
    """Return what is missing: ZeroMQ is always there, and nearly always built with CURVE."""
    return "" if protocol != ENCRYPTED or zmq.has("curve") else "this libzmq is built without CURVE"


def probe(protocol: str, rdma_device: str) -> str:
    """Return "": ZeroMQ always starts."""
    return ""


def text(protocol: str, rdma_device: str) -> str:
    """Describe the protocol for a log line."""
    return "ZeroMQ, encrypted by CURVE" if protocol == ENCRYPTED else "ZeroMQ"
