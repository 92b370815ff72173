"""Reads peers' memory through Mooncake (RDMA or TCP), one process per peer.

SIGKILL of this process enforces a deadline: no byte is written afterwards. A peer that hangs does not delay
other peers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightsync.config import Ports
from weightsync.errors import ConfigError, DeadlineError, ReadError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.protocol.routes import own_address
from weightsync.readers.base import ClosableReader, Read, by_peer, pieces
from weightsync.readers.mooncake_process import MooncakeProcess, probe, readable
from weightsync.readers.ways import rdma_devices

__all__ = ["READER", "MooncakeReader", "MooncakeServer", "absence", "probe", "serve", "text"]

PIECE_NBYTES = 16 << 20
_NOT_MOONCAKES = "32768-60999"
"""Ports of the kernel's default range for clients. Mooncake ignores a range that includes such a port."""


class MooncakeServer:
    """A process with registered memory, which peers read without asking a process."""

    def __init__(
        self, buffer: SharedBuffer, holder: str, host: str, protocol: str, device: str, ports: Ports | None
    ) -> None:
        """Raises TransportError if Mooncake does not work on this host, ConfigError if no port is free."""
        # A process that reaches the port could also write. Over TCP a read-only mapping prevents writes.
        writable = protocol == "rdma"
        self._child = MooncakeProcess(protocol, host, device, [buffer], writable=writable, ports=ports)
        if ports and not ports[0] <= int(self._child.endpoint.rpartition(":")[2]) <= ports[1]:
            self._child.close()
            remedy = f"Mooncake took {self._child.endpoint} instead: give ports outside {_NOT_MOONCAKES}"
            raise ConfigError("sync.ports", f"{ports[0]}-{ports[1]}", f"{remedy}, or refill: zeromq")
        self.offer = Offer(
            holder=holder,
            protocol=protocol,
            memory=buffer.handle,
            endpoint=self._child.endpoint,
            base=self._child.bases[0],
        )

    def close(self) -> None:
        """End the process, as `Server.close` says."""
        self._child.close()


class MooncakeReader(ClosableReader):
    """The reader of ways "tcp" and "rdma"."""

    def __init__(self, targets: Sequence[SharedBuffer], offers: Mapping[str, Offer]) -> None:
        """Raises TransportError if Mooncake does not work on this host."""
        self.ways = {peer: offer.protocol for peer, offer in offers.items()}
        self._offers = offers
        self._children: dict[str, MooncakeProcess] = {}
        try:
            for peer, offer in offers.items():
                host = own_address(offer.endpoint)  # readers' names must be unique among hosts
                self._children[peer] = MooncakeProcess(offer.protocol, host, "", targets, wait=False)
            for child in self._children.values():
                child.wait_ready()
        except BaseException:
            self._release()
            raise
        super().__init__()

    def read(self, reads: Sequence[Read], timeout_s: float) -> dict[str, int]:
        """Run `reads`, as `Reader.read` says."""
        deadline = time.monotonic() + timeout_s
        with self.reading(), self._killed_on_error():
            found = by_peer(reads)
            for peer, its in found.items():
                self._order(peer, its)
            waited, done = set(found), dict[str, int]()
            while waited:
                children = {self._children[peer].answers: peer for peer in waited}
                ready = readable([*children, self.fd], deadline)
                self.check()
                if not ready:
                    raise DeadlineError("refill", sorted(waited), timeout_s)
                for fd in ready:
                    if answer := self._children[children[fd]].receive():
                        done[children[fd]] = _nbytes(children[fd], answer)
                        waited.remove(children[fd])
            return {peer: done[peer] for peer in found}

    def _order(self, peer: str, reads: Sequence[Read]) -> None:
        offer = self._offers[peer]
        cut = [
            (piece.target, piece.offset, offer.base + piece.source, piece.nbytes)
            for piece in pieces(reads, PIECE_NBYTES)
        ]
        try:
            self._children[peer].order({"endpoint": offer.endpoint, "pieces": cut})
        except OSError as error:
            raise ReadError(peer, f"the process that reads it is gone: {error}") from error

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.close()


def _nbytes(peer: str, answer: Mapping[str, Any]) -> int:
    if "error" in answer:
        raise ReadError(peer, answer["error"])
    nbytes: int = answer["nbytes"]
    return nbytes


READER, serve = MooncakeReader, MooncakeServer


def absence(protocol: str) -> str:
    """Return the missing part of this host for `protocol`; empty if none."""
    if protocol == "rdma" and not rdma_devices():
        return "this host has no RDMA device; take tcp or zeromq"
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'weightsync[mooncake]', or take zeromq"
    return ""


def text(protocol: str, rdma_device: str) -> str:
    """Describe `protocol` for a log line."""
    devices = rdma_device or ", ".join(rdma_devices())
    return f"RDMA ({devices}) with Mooncake" if protocol == "rdma" else "TCP with Mooncake"
