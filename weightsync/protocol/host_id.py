"""Tells whether processes can share memory and files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return a text that is equal in processes of one host that see the same shared memory and files.

    Containers of one host differ, unless they share the IPC namespace and the folder of temporary files.
    """
    folders = (os.stat(each) for each in ("/dev/shm", tempfile.gettempdir()))
    shared = [os.readlink("/proc/self/ns/ipc"), *(f"{each.st_dev}.{each.st_ino}" for each in folders)]
    return "/".join([_BOOT.read_text().strip(), *shared])
