"""Listening on one address, on a port of a given range."""

from __future__ import annotations

import errno
import socket

from weightsync.config import Ports
from weightsync.errors import ConfigError, TransportError

BACKLOG = 4096


def listen(host: str, ports: Ports | None, problem: str) -> socket.socket:
    """Return a socket that listens on address `host`, on the first free one of `ports`.

    Without `ports` the kernel chooses a free port. The socket does not block.

    Raises:
        ConfigError: every port of the range is in use; it names ``sync.ports`` and the range.
        TransportError: `host` is not an address of this host. It starts with `problem`.
    """
    for port in range(ports[0], ports[1] + 1) if ports else (0,):
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            if ports and error.errno == errno.EADDRINUSE:
                continue
            raise TransportError(f"{problem} on {host}: {error.strerror or error}") from error
        listening.setblocking(False)
        return listening
    assert ports
    remedy = f"all {ports[1] - ports[0] + 1} are in use on {host}: give a wider range, or another one"
    raise ConfigError("sync.ports", f"{ports[0]}-{ports[1]}", remedy)
