"""A server that Ray did not start, without a model: python -m tests.fleets.served PORT WIDTH.

Answers each line of stdin with the version that it serves and the digest of its weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tests.fleets.actors import build
from weightsync.actors.servers.engine import JoinedEngine
from weightsync.testing import DictEngine

APART = "unshare", "-i", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"
"""In namespaces of its own, a process shares no memory with others of this host."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def can_be_apart() -> bool:
    return subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


class ServedProcess:
    """The process of such a server. `prefix`: what the command begins with, such as `APART`."""

    def __init__(self, port: int, width: int, env: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "tests.fleets.served", str(port), str(width)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).parents[2],
        )

    def holds(self) -> tuple[int, str]:
        """The version that it serves, and the digest of its weights."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        version, found = self._process.stdout.readline().split()
        return int(version), found

    def kill(self) -> None:
        for child in psutil.Process(self._process.pid).children(recursive=True):  # of the prefix
            child.kill()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()


async def main(port: int, width: int) -> None:
    torch.manual_seed(1)
    engine = DictEngine("", build(width).state_dict())
    joined = JoinedEngine(engine, port, asyncio.get_running_loop())
    joined.join()
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(f"{engine.serving()} {digest(engine.tensors)}\n")
            sys.stdout.flush()
    finally:
        joined.leave()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
