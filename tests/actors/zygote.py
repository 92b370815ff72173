"""A process that has imported torch and compiled the kernels, and forks into Ray's workers.

Tests start some hundred actors. Importing torch and compiling take each of them 3 s of processor time, which
the fork saves. Ray starts a shell script in place of Python. The script is the worker to Ray; it passes
arguments, environment and output to the zygote, and ends with the process that the zygote forks.

python -m tests.actors.zygote SOCKET        # serves until its standard input ends
python -I -S tests/actors/zygote.py SOCKET WORKER ARGUMENT …        # what the script runs
"""

from __future__ import annotations

import argparse
import array
import atexit
import json
import os
import signal
import socket
import sys

_NUM_FDS = 2
_ORDER_S = 120.0
"""How long a fork waits for its order. The script itself waits for as long as the worker lives."""


def ask(path: str, argv: list[str]) -> None:
    """Have `argv` run in a fork, with this process's environment and output, and wait for its end."""
    order = json.dumps([argv, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as zygote:
        zygote.connect(path)
        fds = array.array("i", range(1, 1 + _NUM_FDS))
        zygote.sendmsg(
            [len(order).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
        )
        zygote.sendall(order)
        while zygote.recv(1):
            pass


def without_setup(argv: list[str]) -> list[str]:
    """Return the worker's own arguments, once this process has the variables of its runtime environment.

    Ray starts a worker with a runtime environment through a script, which would start it with Python. If the
    environment is more than variables, the script replaces this process.
    """
    if os.path.basename(argv[0]) != "setup_worker.py":
        return argv
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
    import selectors

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
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            try:
                client, _ = server.accept()
            except BlockingIOError:  # it gave up meanwhile
                continue
            if os.fork() == 0:
                selector.close()
                server.close()
                _become(client)
            client.close()


def _become(client: socket.socket) -> None:
    """Be the worker that `client` asks for. Its end closes the connection."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    client.settimeout(_ORDER_S)
    size, ancillary, _, _ = client.recvmsg(8, socket.CMSG_SPACE(_NUM_FDS * 4))
    fds = array.array("i", ancillary[0][2])
    with client.makefile("rb") as stream:
        argv, environment, folder = json.loads(stream.read(int.from_bytes(size, "little")))
    for number, fd in enumerate(fds, 1):
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    client.detach()  # ends with the process, and with it the script
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


def _warm_up() -> None:
    """Import and compile what most actors need, and import what Ray itself does.

    Not Ray: its forks hang.
    """
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
