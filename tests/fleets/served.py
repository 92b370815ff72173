"""A server that Ray did not start, without a model: python -m tests.fleets.served PORT WIDTH [apart].

Answers each line of stdin, an adapter's name or nothing, with the version that it serves and the digest of
its weights. One that is apart is in namespaces of its own, and shares no memory with others of this host.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tests.fleets.actors import build
from tests.fleets.local_cluster import forking_python
from tests.fleets.slots import SlotEngine
from weightsync.actors.servers.app import JoinedEngine

STOP = "stop"
APART = "unshare", "-i", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"
"""In namespaces of its own, a process shares no memory with others of this host."""
_IPC_AND_MOUNTS = 0x08000000 | 0x00020000
"""`unshare`'s flags, which Python has from 3.12 on."""


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


def be_apart() -> None:
    """Do what `APART` does, in this thread and those that it starts."""
    if ctypes.CDLL(None).unshare(_IPC_AND_MOUNTS):
        raise OSError("this user cannot make namespaces")
    for options in (["--make-rprivate", "/"], ["-t", "tmpfs", "none", "/dev/shm"]):
        subprocess.run(["mount", *options], check=True)


class ServedProcess:
    """The process of such a server. `runs`: a command that runs a module, by default in a fork."""

    def __init__(
        self, port: int, width: int, env: Mapping[str, str], runs: Sequence[str] = (), apart: bool = False
    ) -> None:
        command = [*(runs or [forking_python()]), "-m", "tests.fleets.served", str(port), str(width)]
        self._process = subprocess.Popen(
            [*command, "apart"] if apart else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).parents[2],
        )

    def holds(self, adapter: str = "") -> tuple[int, str]:
        """The version that it serves, of an adapter if one is named, and the digest of its weights."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{adapter}\n")
        self._process.stdin.flush()
        version, found = self._process.stdout.readline().split()
        return int(version), found

    def stop(self) -> None:
        """Have it stop, so that it answers nobody, and keep its connections."""
        assert self._process.stdin
        self._process.stdin.write(f"{STOP}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()


async def main(port: int, width: int) -> None:
    torch.manual_seed(1)
    engine = SlotEngine("", build(width).state_dict())
    joined = JoinedEngine(engine, port, asyncio.get_running_loop())
    joined.join()
    try:
        while asked := await asyncio.to_thread(sys.stdin.readline):
            if asked.strip() == STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            held = engine.adapters.get(asked.strip()) if asked.strip() else engine
            sys.stdout.write(f"{held.serving()} {digest(held.tensors)}\n" if held else "0 none\n")
            sys.stdout.flush()
    finally:
        joined.leave()


if __name__ == "__main__":
    if sys.argv[3:] == ["apart"]:
        be_apart()
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
