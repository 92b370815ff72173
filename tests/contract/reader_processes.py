"""A holder's process that offers a buffer over several protocols, and can be stopped and killed: `Peer`."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from tests.forked import forking
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.readers import serve, serve_unmapped

_FACTOR = 0x1E3779B97F4A7C15


def pattern(nbytes: int, key: int) -> torch.Tensor:
    """uint8[nbytes], other bytes in other places and for another key."""
    return (torch.arange(-(-nbytes // 8)) * _FACTOR + key).view(torch.uint8)[:nbytes]


class Copied:
    """Memory that only its process can read, as a GPU's: each answer is a copy."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.nbytes = len(memory)

    def read(self, start: int, nbytes: int) -> bytes:
        return self._memory[start : start + nbytes].numpy().tobytes()


def hold(pipe: Connection, key: int, nbytes: int, protocols: Sequence[str]) -> None:
    """Be the holder, which says what it offers, until the other end of `pipe` is closed.

    "unmapped" among `protocols`: over ZeroMQ, as memory that nobody maps.
    """
    os.setsid()
    buffer = SharedBuffer.create(nbytes)
    buffer.tensor.copy_(pattern(nbytes, key))
    name, host = f"holder {key}", "127.0.0.1"
    servers = [
        serve_unmapped(Copied(buffer.tensor), name, host)
        if protocol == "unmapped"
        else serve(buffer, name, host, protocol)
        for protocol in protocols
    ]
    pipe.send({protocol: server.offer for protocol, server in zip(protocols, servers, strict=True)})
    with contextlib.suppress(EOFError):
        pipe.recv()
    for server in servers:
        server.close()
    buffer.close()


class Peer:
    """One such process, and all that it started, as one group. It is there once its offers are asked for."""

    def __init__(self, key: int, nbytes: int, protocols: Sequence[str]) -> None:
        self.key = key
        context = forking()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=hold, args=(theirs, key, nbytes, protocols))
        self._process.start()
        theirs.close()
        self._offers: dict[str, Offer] = {}

    def offer(self, protocol: str) -> Offer:
        if not self._offers:
            self._offers = self._pipe.recv()
        return self._offers[protocol]

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def leave(self) -> None:
        """It ends by itself."""
        self._pipe.close()
        self._process.join()

    def end(self) -> None:
        """What is left of it is killed."""
        self._process.kill()  # which may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join()
        self._pipe.close()
