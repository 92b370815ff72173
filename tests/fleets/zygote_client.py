"""The script that stands for a process that the zygote forks. Hundreds of it start, so it imports little.

A module's process is killed when the script is. A worker ends by itself.

python -I -S tests/fleets/zygote_client.py SOCKET WORKER ARGUMENT …
python -I -S tests/fleets/zygote_client.py SOCKET -m MODULE ARGUMENT …
"""

import marshal
import os
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket  # `socket` takes longer than Python itself

FDS = (0, 1, 2)
"""What the process reads and writes: this script's input, output and errors."""


def ask(path: str, argv: list[str]) -> int:
    """Have `argv` run in a fork, with this process's environment and output. Returns its status."""
    zygote = socket(AF_UNIX)
    zygote.connect(path)
    order = marshal.dumps((argv, dict(os.environ), os.getcwd()))
    fds = b"".join(fd.to_bytes(4, sys.byteorder) for fd in FDS)
    zygote.sendmsg([len(order).to_bytes(8, "little")], [(SOL_SOCKET, SCM_RIGHTS, fds)])
    zygote.sendall(order)
    status = 1  # it ended before it said another one
    while said := zygote.recv(1):
        status = said[0]
    return status


def without_setup(argv: list[str]) -> list[str]:
    """Return the worker's own arguments, once this process has the variables of its runtime environment.

    Ray starts a worker with a runtime environment through a script, which would start it with Python. If the
    environment is more than variables, the script replaces this process.
    """
    if os.path.basename(argv[0]) != "setup_worker.py":
        return argv
    import argparse
    import json

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


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], without_setup(sys.argv[2:])))
