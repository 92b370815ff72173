"""Sockets of ZeroMQ that no other user of the host may open, and that are closed with their owners."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from weightsync.errors import ConfigError

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

MAX_PATH_NBYTES = 107
"""The kernel's limit for the path of a socket."""
_PREFIX = "weightsync-"
_MAX_FOLDER_NBYTES = MAX_PATH_NBYTES - len(f"/{_PREFIX}01234567/replies")
_SHORT = "/tmp", "/dev/shm"


class PrivateDirectory:
    """A directory of mode 0700, removed when this process ends, even by SIGKILL.

    The directory is in TMPDIR, or in another folder if a socket's path in TMPDIR would be too long.
    """

    def __init__(self) -> None:
        """Raises ConfigError if TMPDIR is too long, and no other folder can be written."""
        self.path = _make()
        # The shell's standard input ends when this process does. The shell then removes the directory.
        # The shell is detached, since Ray may kill a worker together with the worker's children.
        script = 'exec 3<&0; (read -r _ <&3; rm -rf "$1") >/dev/null 2>&1 &'
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(self.path)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._janitor.wait()

    def remove(self) -> None:
        """Remove the directory now. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()


def _make() -> Path:
    given = tempfile.gettempdir()
    if (nbytes := len(os.fsencode(given))) <= _MAX_FOLDER_NBYTES:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=given))
    tried = []
    for folder in (*_SHORT, os.environ.get("XDG_RUNTIME_DIR", "")):
        if folder and len(os.fsencode(folder)) <= _MAX_FOLDER_NBYTES:
            try:
                return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
            except OSError as error:
                tried.append(f"{folder}: {error.strerror}")
    raise ConfigError(
        "TMPDIR",
        given,
        f"its path has {nbytes} bytes: give at most {_MAX_FOLDER_NBYTES}, since a socket's path has "
        f"at most {MAX_PATH_NBYTES} ({'; '.join(tried)})",
    )


def own_socket(owner: object, kind: int, max_nbytes: int) -> tuple[Socket, Callable[[], object]]:
    """Return a socket in a context of its own, and a function that closes both. Safe to call twice.

    Both are closed when `owner` is collected, too. Python's collector of garbage might end the context before
    the socket, and wait for the socket forever.
    """
    context = zmq.Context(io_threads=1)
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_nbytes)
    close = weakref.finalize(owner, _close, context, socket)
    close.atexit = False  # a thread may still use it
    return socket, close


def _close(context: zmq.Context[Socket], socket: Socket) -> None:
    socket.close()
    context.term()
