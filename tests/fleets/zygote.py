"""A process that has imported torch and compiled the kernels, and forks into Ray's workers.

Tests start some hundred actors. Importing torch and compiling take each of them 3 s of processor time, which
the fork saves. Ray starts a shell script in place of Python. The script is the worker to Ray; it passes
arguments, environment and output to the zygote, and ends with the process that the zygote forks. A module
that a test runs in a process of its own is forked in the same way.

Ray is imported in a fork of the zygote, which forks the workers of one job: Ray reads the job's number from
its environment on import, and a worker with another number ends at once. Workers that are to have a vLLM
say so in their environment, and have another fork, which has imported it, too.

python -m tests.fleets.zygote SOCKET        # serves until its standard input ends

`zygote_client.py` is what the script runs.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import marshal
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from tests.fleets import zygote_client
from weightsync.protocol.collector import collector_paused

Order = tuple[Sequence[str], Mapping[str, str], str]
"""Arguments of a worker, its environment and its folder."""

IMPORTS = "WEIGHTSYNC_TEST_IMPORTS"
"""A variable of workers that are forked from a process that has imported vLLM: "vllm"."""
_ON_USE = (
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
    "zoneinfo",
)
"""What each worker imports as it starts, for a tenth of a second of a core. Other versions of Ray differ."""
_NUM_FORKS = 8
"""How many jobs have a zygote at a time, and those with vLLM another one."""
_NUM_FDS = len(zygote_client.FDS)
_ORDER_S = 120.0
"""How long a fork waits for its order. The script itself waits for as long as the worker lives."""


def serve(path: str) -> None:
    """Fork for each that asks, until standard input ends. Those that ask during the warm-up wait."""
    atexit.register(_end)  # the first one is called last, also in forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to wait for children
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        server.bind(path)
        server.listen(64)
        server.setblocking(False)
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        _warm_up()
        selector.register(server, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        forks = Forks([selector, server])
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            try:
                client, _ = server.accept()
            except BlockingIOError:  # it gave up meanwhile
                continue
            with client:
                forks.pass_on(client)


class Forks:
    """Forks of the zygote that have imported Ray, one for each set of variables: Ray's and `IMPORTS`."""

    def __init__(self, inherited: Sequence[selectors.BaseSelector | socket.socket]) -> None:
        """`inherited`: what forks close."""
        self._inherited = inherited
        self._forks: dict[tuple[tuple[str, str], ...], socket.socket] = {}

    def pass_on(self, client: socket.socket) -> None:
        """Have the worker that `client` asks for forked."""
        client.settimeout(_ORDER_S)
        try:
            order, fds = _receive(client)
        except (OSError, EOFError, ValueError):  # the script ended before it sent its order
            return
        settings = tuple(sorted((k, v) for k, v in order[1].items() if k.startswith("RAY_") or k == IMPORTS))
        theirs = [client.fileno(), *fds]
        fork = self._forks.pop(settings, None) or self._make(order[1], theirs)
        if len(self._forks) == _NUM_FORKS:
            self._forks.pop(next(iter(self._forks))).close()
        try:
            _send(fork, order, theirs)
            self._forks[settings] = fork
        except OSError:  # it ended: Ray asks again for a worker that does not come
            fork.close()
        for fd in fds:
            os.close(fd)

    def _make(self, environment: Mapping[str, str], unneeded: Sequence[int]) -> socket.socket:
        """`unneeded`: file descriptors that the fork does without."""
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            return ours
        for each in (ours, *self._inherited, *self._forks.values()):
            each.close()
        for fd in unneeded:  # who holds a client's connection keeps its script from ending
            os.close(fd)
        self._forks.clear()
        os.environ.update(environment)
        _import_ray()
        while True:
            try:
                order, (client, *fds) = _receive(theirs)
            except (OSError, EOFError, ValueError):
                _end()
            if os.fork() == 0:
                theirs.close()
                _become(order, client, fds)
            for fd in (client, *fds):
                os.close(fd)


def _send(to: socket.socket, order: Order, fds: Sequence[int]) -> None:
    data = marshal.dumps(order)
    socket.send_fds(to, [len(data).to_bytes(8, "little")], fds)
    to.sendall(data)


def _receive(sender: socket.socket) -> tuple[Order, list[int]]:
    """Receive what `_send` sent. Raises EOFError or ValueError if the sender is gone."""
    size, fds, _, _ = socket.recv_fds(sender, 8, 1 + _NUM_FDS)
    with sender.makefile("rb", buffering=0) as stream:
        data, nbytes = b"", int.from_bytes(size, "little")
        while part := stream.read(nbytes - len(data)):
            data += part
    for fd in fds:
        os.set_inheritable(fd, False)
    return marshal.loads(data), fds


def _become(order: Order, client: int, fds: Sequence[int]) -> None:
    """Run `order` in this process. The script gets its status, then the end of the connection."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    argv, environment, folder = order
    for number, fd in zip(zygote_client.FDS, fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it was that of other variables
    os.chdir(folder)
    if is_module := argv[0] == "-m":
        threading.Thread(target=_end_with, args=(client,), daemon=True).start()
    sys.argv = argv = [*argv[is_module:]]
    try:
        if is_module:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ending:
        os.write(client, bytes([ending.code if isinstance(ending.code, int) else bool(ending.code)]))
        raise
    os.write(client, b"\0")
    sys.exit()


def _end_with(client: int) -> None:
    """Kill this process when the script that stands for it is killed."""
    os.set_blocking(client, True)
    os.read(client, 1)
    signal.raise_signal(signal.SIGKILL)


def _end() -> None:
    """End before Python clears all modules: that copies the zygote's pages, for a second of a core."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the script has the status


@collector_paused
def _import_ray() -> None:
    """Import Ray, and what of weightsync imports it. Ray reads its variables from the environment now."""
    import ray  # noqa: F401

    from tests.fleets import actors  # noqa: F401
    from tests.warm import keep_from_collection
    from weightsync.actors import engine, trainer_shard  # noqa: F401
    from weightsync.actors.checkpoints import checkpoint_shard  # noqa: F401
    from weightsync.actors.holders import weight_holder  # noqa: F401
    from weightsync.actors.ray import process  # noqa: F401
    from weightsync.transports import gloo  # noqa: F401

    for module in _ON_USE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if os.environ.get(IMPORTS) == "vllm":
        from tests.vllm_imports import import_vllm

        import_vllm()
    keep_from_collection()


@collector_paused
def _warm_up() -> None:
    """Import and compile what most actors need, and import what Ray itself does."""
    import google.protobuf.json_format  # noqa: F401
    import jsonschema  # noqa: F401
    import msgpack  # noqa: F401
    import pydantic.v1  # noqa: F401
    import requests  # noqa: F401
    import starlette.requests  # noqa: F401
    import uvloop  # noqa: F401

    from tests.warm import keep_from_collection

    keep_from_collection()
    if "ray" in sys.modules:
        raise RuntimeError("a module of weightsync imports ray")


if __name__ == "__main__":
    serve(sys.argv[1])
