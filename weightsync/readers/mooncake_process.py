"""The parent's end of a Mooncake process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weightsync.config import Ports
from weightsync.errors import TransportError, WireError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.decoding import decoded

logger = logging.getLogger("weightsync.readers")

START_S = 30.0
_answers = msgspec.json.Decoder(dict[str, Any])
_CHILD = "weightsync.readers.mooncake_child"
_FORCE = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}
_RANGE = ("MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT"), ("MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT")
"""Variables of Mooncake's range of ports, in old and new versions."""
_TIMES = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "5", "MC_TRANSFER_TIMEOUT": "30"}
"""Mooncake's own time-outs in seconds: without progress, and for a whole piece."""


class MooncakeProcess:
    """A process that runs `mooncake_child`, with registered memory."""

    def __init__(
        self,
        protocol: str,
        host: str,
        device: str,
        memories: Sequence[SharedBuffer] = (),
        *,
        writable: bool = True,
        wait: bool = True,
        ports: Ports | None = None,
    ) -> None:
        self.endpoint, self.bases = "", list[int]()
        fds = [memory.fileno() for memory in memories]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            pass_fds=fds,
            env=_environment(protocol, host, ports),
        )
        assert self._process.stdout
        self.answers = self._process.stdout.fileno()
        self._heard = b""
        sizes = [(fd, memory.handle.nbytes) for fd, memory in zip(fds, memories, strict=True)]
        with contextlib.suppress(OSError):  # the process ended: wait_ready says so
            self.order({"host": host, "device": device, "memories": sizes, "writable": writable})
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the memory is registered. Raises TransportError if Mooncake does not start."""
        answer, deadline = None, time.monotonic() + START_S
        while not answer and readable([self.answers], deadline):
            answer = self.receive()
        if not answer or "error" in answer:
            self.close()
            raise TransportError(str(answer["error"]) if answer else "Mooncake's process does not answer")
        self.endpoint, self.bases = answer["endpoint"], answer["bases"]

    def order(self, order: Mapping[str, object]) -> None:
        """Send an order. Raises OSError if the process has ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Receive the answer; None until the line is complete. Other lines, or no line, give an error."""
        data = os.read(self.answers, 1 << 16)
        if not data:
            return {"error": f"Mooncake's process ended, status {self._process.wait()}"}
        self._heard += data
        if not self._heard.endswith(b"\n"):
            return None
        line, self._heard = self._heard, b""
        try:
            return decoded(_answers.decode, line, "an answer of Mooncake's process")
        except WireError as error:
            return {"error": str(error)}

    def kill(self) -> None:
        """Send SIGKILL: an orderly end may take seconds, or wait for ever."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(OSError):  # an order may be left in the pipe
                pipe.close()


def probe(protocol: str, device: str) -> str:
    """Return why Mooncake does not work here with `protocol`; empty if it works. Starts a process."""
    try:
        child = MooncakeProcess(protocol, "127.0.0.1", device)
    except TransportError as error:
        return str(error)
    child.close()
    return ""


def _environment(protocol: str, host: str, ports: Ports | None) -> dict[str, str]:
    given = zip(_RANGE, map(str, ports or ()), strict=False)
    bounds = {name: port for names, port in given for name in names}
    kept = {name: value for name, value in os.environ.items() if name not in _FORCE.values()}
    found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), _FORCE[protocol]: "1"}
    if ":" in host:
        found["MC_USE_IPV6"] = "1"
    return {**_TIMES, **kept, **found, **bounds}


def readable(fds: Sequence[int], deadline: float) -> list[int]:
    """Wait for `fds` until the deadline. Returns the readable ones."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    left = deadline - time.monotonic()
    return [fd for fd, _ in poll.poll(left * 1e3)] if left > 0 else []
