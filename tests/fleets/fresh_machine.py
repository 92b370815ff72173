"""Runs a shell script as on a machine of its own: nobody else's processes, ports, clusters or home folder.

python -m tests.fleets.fresh_machine SCRIPT        # within `IN_A_NAMESPACE`: it mounts over /tmp and /dev/shm
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

from tests.patience import patient

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
IN_A_NAMESPACE = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child")
HOME, FOLDER = Path("/tmp/home"), Path("/tmp/empty")
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def why_not() -> str:
    """What such a machine lacks here, or nothing."""
    if os.geteuid() or not shutil.which("unshare"):
        return "needs root and unshare"
    if missing := [name for name in ("ray", "weightsync") if not (BIN / name).exists()]:
        return f"{', '.join(missing)} is not installed in {BIN}"
    if ROOT.is_relative_to("/tmp") or BIN.is_relative_to("/tmp"):
        return "/tmp is another folder there, and has no checkout"
    tried = subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


def on_a_fresh_machine(script: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """What `script` did, from an empty folder and with an empty home; all of its processes have ended."""
    return subprocess.run(
        [*IN_A_NAMESPACE, sys.executable, "-m", "tests.fleets.fresh_machine", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(timeout_s),
        check=False,
    )


def main(script: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anyone:
        fcntl.ioctl(anyone, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    for kind, folder in (("proc", "/proc"), ("tmpfs", "/tmp"), ("tmpfs", "/dev/shm")):
        subprocess.run(["mount", "-t", kind, kind, folder], check=True)
    for made in (HOME, FOLDER):
        made.mkdir()
    os.chdir(FOLDER)
    environment = {
        "HOME": str(HOME),
        "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "CHECKOUT": str(ROOT),
    }
    os.execve("/bin/bash", ["bash", "-ceuo", "pipefail", script], environment)


if __name__ == "__main__":
    main(sys.argv[1])
