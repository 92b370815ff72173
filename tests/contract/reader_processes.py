"""A holder's process that offers a buffer over several protocols, and can be stopped and killed: `Peer`.

Run as a program it is the holder: it prints its offers, pickled, and ends with its stdin.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch

from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.readers import serve

_FACTOR = 0x1E3779B97F4A7C15


def pattern(nbytes: int, key: int) -> torch.Tensor:
    """uint8[nbytes], other bytes in other places and for another key."""
    return (torch.arange(-(-nbytes // 8)) * _FACTOR + key).view(torch.uint8)[:nbytes]


def main(key: int, nbytes: int, protocols: Sequence[str]) -> None:
    buffer = SharedBuffer.create(nbytes)
    buffer.tensor.copy_(pattern(nbytes, key))
    servers = [serve(buffer, f"holder {key}", "127.0.0.1", protocol) for protocol in protocols]
    offers = {server.offer.protocol: server.offer for server in servers}
    print(base64.b64encode(pickle.dumps(offers)).decode(), flush=True)  # noqa: T201
    sys.stdin.read()
    for server in servers:
        server.close()
    buffer.close()


class Peer:
    """One such process, and all that it started, as one group. It is there once its offers are asked for."""

    def __init__(self, key: int, nbytes: int, protocols: Sequence[str]) -> None:
        self.key = key
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(key), str(nbytes), *protocols],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._offers: dict[str, Offer] = {}

    def offer(self, protocol: str) -> Offer:
        if not self._offers:
            assert self._process.stdout
            self._offers = pickle.loads(base64.b64decode(self._process.stdout.readline()))
        return self._offers[protocol]

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def leave(self) -> None:
        """It ends by itself."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def end(self) -> None:
        """What is left of it is killed."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
