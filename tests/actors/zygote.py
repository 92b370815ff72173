"""A process that has imported torch and compiled the kernels, and forks into Ray's workers.

Tests start some hundred actors. Importing torch and compiling take each of them 3 s of processor time, which
the fork saves. Ray starts a shell script in place of Python. The script is the worker to Ray; it passes
arguments, environment and output to the zygote, and ends with the process that the zygote forks.

Ray is imported in a fork of the zygote, which forks the workers of one job: Ray reads the job's number from
its environment on import, and a worker with another number ends at once. Workers that are to have a vLLM
say so in their environment, and have another fork, which has imported it, too.

python -m tests.actors.zygote SOCKET        # serves until its standard input ends
python -I -S tests/actors/zygote.py SOCKET WORKER ARGUMENT …        # what the script runs
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

Order = tuple[Sequence[str], Mapping[str, str], str]
"""Arguments of a worker, its environment and its folder."""

IMPORTS = "WEIGHTSYNC_TEST_IMPORTS"
"""A variable of workers that are forked from a process that has imported vLLM: "vllm"."""
_NUM_FORKS = 8
"""How many jobs have a zygote at a time, and those with vLLM another one."""
_NUM_FDS = 2
_ORDER_S = 120.0
"""How long a fork waits for its order. The script itself waits for as long as the worker lives."""


def ask(path: str, argv: list[str]) -> None:
    """Have `argv` run in a fork, with this process's environment and output, and wait for its end."""
    with socket.socket(socket.AF_UNIX) as zygote:
        zygote.connect(path)
        _send(zygote, (argv, dict(os.environ), os.getcwd()), range(1, 1 + _NUM_FDS))
        while zygote.recv(1):
            pass


def without_setup(argv: list[str]) -> list[str]:
    """Return the worker's own arguments, once this process has the variables of its runtime environment.

    Ray starts a worker with a runtime environment through a script, which would start it with Python. If the
    environment is more than variables, the script replaces this process.
    """
    if os.path.basename(argv[0]) != "setup_worker.py":
        return argv
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    known, worker = parser.parse_known_args(argv[1:])
    context = json.loads(known.serialized_runtime_env_context)
    if any(value for name, value in context.items() if name not in ("env_vars", "py_executable")):
        os.execv(sys.executable, [sys.executable, *argv])
    for name, value in context["env_vars"].items():
        os.environ[name] = os.path.expandvars(value)
    return worker


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
        except (OSError, ValueError):  # the script ended before it sent its order
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
            except (OSError, ValueError):
                _end()
            if os.fork() == 0:
                theirs.close()
                _become(order, fds)  # keeps the client's connection
            for fd in (client, *fds):
                os.close(fd)


def _send(to: socket.socket, order: Order, fds: Sequence[int]) -> None:
    data = json.dumps(order).encode()
    socket.send_fds(to, [len(data).to_bytes(8, "little")], fds)
    to.sendall(data)


def _receive(sender: socket.socket) -> tuple[Order, list[int]]:
    """Receive what `_send` sent. Raises ValueError if the sender is gone."""
    size, fds, _, _ = socket.recv_fds(sender, 8, 1 + _NUM_FDS)
    with sender.makefile("rb", buffering=0) as stream:
        data, nbytes = b"", int.from_bytes(size, "little")
        while part := stream.read(nbytes - len(data)):
            data += part
    for fd in fds:
        os.set_inheritable(fd, False)
    return json.loads(data), fds


def _become(order: Order, fds: Sequence[int]) -> None:
    """Be the worker of `order`. Its end closes the connection of the script."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    argv, environment, folder = order
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


def _end() -> None:
    """End before Python clears all modules: that copies the zygote's pages, for a second of a core."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nobody reads a worker's status


def main() -> None:
    path, *argv = sys.argv[1:]
    if argv:
        ask(path, without_setup(argv))
        return
    serve(path)


def _import_ray() -> None:
    """Import Ray, and what of weightsync imports it. Ray reads its variables from the environment now."""
    import ray  # noqa: F401

    from tests.warm import keep_from_collection
    from weightsync.actors import checkpoint_shard, engine, trainer_shard, weight_holder  # noqa: F401

    if os.environ.get(IMPORTS) == "vllm":
        from tests.vllm_imports import import_vllm

        import_vllm()
    keep_from_collection()


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
    main()
