"""Finds pairs of ranks that do not reach each other, once they take long to connect."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from torch.distributed.distributed_c10d import Store

from weightsync.errors import WireError
from weightsync.protocol.decoding import decoded
from weightsync.protocol.routes import host_of, joined

TRY_S = 1.0
"""How long a rank waits for another rank's answer."""
_MOST_AT_ONCE = 16
_POLL_S = 0.01
CONNECTED = "connected/{}"
"""The key that a rank sets once it is connected to all other ranks."""


class Unreached(msgspec.Struct, frozen=True):
    """A rank at `caller` without a connection to rank `rank` at `address`."""

    caller: str
    rank: int
    address: str
    cause: str


_noted = msgspec.json.Decoder(list[Unreached])


class Reach:
    """A rank that takes long to connect. It listens for trials of other ranks, until `close`.

    Each connected rank has set `CONNECTED`. Errors of the store (RuntimeError) propagate.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, address: str) -> None:
        """`address` is this host's address for the other ranks' connections."""
        self._store, self._rank, self._num_ranks, self._address = store, rank, num_ranks, address
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=num_ranks
        )

    def unconnected(self) -> list[int]:
        """Return the ranks that are not connected to all other ranks."""
        return [rank for rank in range(self._num_ranks) if not self._store.check([CONNECTED.format(rank)])]

    def examine(self) -> None:
        """Try all other unconnected ranks, and write in the store which ranks this rank does not reach."""
        self._store.set(_listens(self._rank), joined(self._address, self._listener.getsockname()[1]))
        others = [rank for rank in self.unconnected() if rank != self._rank]
        give_up = time.monotonic() + TRY_S  # the other ranks begin to listen at about the same time
        while not self._store.check([*map(_listens, others)]) and time.monotonic() < give_up:
            time.sleep(_POLL_S)
        there = [rank for rank in others if self._store.check([_listens(rank)])]
        endpoints = {rank: self._store.get(_listens(rank)).decode(errors="replace") for rank in there}
        with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
            causes = dict(zip(endpoints, threads.map(_try, endpoints.values()), strict=True))
        still = self.unconnected()  # ranks that are connected by now no longer listen
        found = [
            Unreached(self._address, rank, host_of(endpoints[rank]), cause)
            for rank, cause in causes.items()
            if cause and rank in still
        ]
        self._store.set(_unreached(self._rank), msgspec.json.encode(found).decode())

    def text(self) -> str:
        """Return the ranks' notes, such as ``rank 1 at 10.0.0.2 does not reach rank 2 at 10.0.0.3``."""
        said = []
        for rank in range(self._num_ranks):
            if self._store.check([_unreached(rank)]):
                with contextlib.suppress(WireError):  # the other ranks' notes count
                    said += _lines(rank, decoded(_noted.decode, self._store.get(_unreached(rank))))
        return "; ".join(said)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._listener.close()


def _lines(rank: int, noted: Iterable[Unreached]) -> list[str]:
    return [
        f"rank {rank} at {each.caller} does not reach rank {each.rank} at {each.address} ({each.cause})"
        for each in noted
    ]


def _try(endpoint: str) -> str:
    """Try a connection to `endpoint`. Returns the cause of a failure, or ""."""
    try:
        address = host_of(endpoint), int(endpoint.rpartition(":")[2])
        with contextlib.closing(socket.create_connection(address, TRY_S)):
            return ""
    except (OSError, OverflowError, ValueError) as error:  # the port may not exist
        return getattr(error, "strerror", "") or str(error)


def _listens(rank: int) -> str:
    return f"listens/{rank}"


def _unreached(rank: int) -> str:
    return f"unreached/{rank}"
