"""A check for file descriptors that this process has left."""

from __future__ import annotations

import errno
import os
import resource


def shortage(num: int = 1) -> str:
    """Return why `num` descriptors cannot be opened, and the remedy; empty if they can.

    ZeroMQ ends the process if it accepts a connection without a descriptor left, so ask this first.
    """
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(num))
    except OSError as error:
        if error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"it has no file descriptors left of {limit}: raise its limit (ulimit -n)"
        if error.errno == errno.ENFILE:
            return "its host has no file descriptors left: raise fs.file-max (sysctl)"
        raise
    finally:
        for each in opened:
            os.close(each)
    return ""
