"""Mooncake over TCP between two hosts: a reader is killed in mid-read, a source is, and bytes come late.

unshare … python -m tests.hosts.mooncake_reads. Run so, it makes the hosts and starts itself on them, as
``serve ADDRESS`` or ``read``.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tests.hosts.network import Host, Network
from tests.patience import patient
from weightsync.errors import WeightSyncError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.readers import Read, open_reader, serve

NBYTES = 32 << 20
MBIT_PER_S = 100
WHOLE_S = NBYTES * 8 / MBIT_PER_S / 1e6
WAIT_S = patient(20)
SHORT_S = WHOLE_S / 2
USED_AGAIN = 0x5A
COUNTER = Path("/sys/class/net/reader/statistics/tx_bytes")
"""The far end of the reader's link: what it has received, as `Host.nbytes`."""
_SILENT_NBYTES = 64 << 10
"""What a link may carry while nothing is read."""
_SEGMENT_NBYTES = 1448


class Process:
    """One of the two, on a host."""

    def __init__(self, host: Host, *arguments: str) -> None:
        self.host = host
        command = [sys.executable, "-m", "tests.hosts.mooncake_reads", *arguments]
        self._process = host.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Return its next line, within a deadline."""
        out = self._process.stdout
        assert out
        with ThreadPoolExecutor(1) as thread:
            line: Future[str] = thread.submit(out.readline)
            try:
                return line.result(WAIT_S).rstrip("\n")
            except TimeoutError:
                self._process.kill()
                raise AssertionError(f"{self.host.name} said nothing for {WAIT_S} s") from None

    def end(self) -> None:
        """Close its input, at which it ends."""
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait(WAIT_S) == 0


def main() -> int:
    """Print what came of each case. Returns 0."""
    network = Network(("source", "reader"))
    source, reader = network.hosts.values()
    reader.set_rate(MBIT_PER_S)  # what it receives
    serving = Process(source, "serve", source.address)
    offered = serving.hear()
    kill_reader(reader, offered)
    come_late(reader, offered)
    kill_source(source, reader, offered)
    serving = Process(source, "serve", source.address)
    whole(reader, serving.hear())
    serving.end()
    return 0


def kill_reader(reader: Host, offered: str) -> None:
    """A reader that is killed takes its Mooncake with it; the source serves the next."""
    reading = _start(reader, offered, WAIT_S)
    reader.kill(int(reading.hear()))
    before, began = reader.nbytes(), time.monotonic()
    _wait_ended(reader)
    ended_s = time.monotonic() - began
    _wait_silent(reader)
    late = reader.nbytes() - before
    assert late < NBYTES / 2, late
    sys.stdout.write(f"reader killed: its Mooncake ended within {ended_s:.1f} s; {late} bytes came later\n")
    whole(reader, offered)


def kill_source(source: Host, reader: Host, offered: str) -> None:
    """A source that is killed is named soon, and nothing of it lands afterwards."""
    reading = _start(reader, offered, WAIT_S)
    reading.hear()
    offer: Offer = pickle.loads(base64.b64decode(offered))
    source.kill(offer.memory.pid)
    began = time.monotonic()
    kind, _, cause = reading.hear().split(maxsplit=2)
    took_s = time.monotonic() - began
    assert kind == "ReadError", (kind, cause)
    assert "the source" in cause
    assert took_s < patient(5)
    _wait_ended(source)
    _check_kept(reading)
    sys.stdout.write(f"source killed: after {took_s:.1f} s, {cause}\n")


def come_late(reader: Host, offered: str) -> None:
    """What comes after the deadline, as a cut link is back, reaches the host and no memory that is used."""
    reading = _start(reader, offered, SHORT_S)
    reading.hear()
    reader.link(up=False)
    began = time.monotonic()
    kind, at_error, cause = reading.hear().split(maxsplit=2)
    took_s = time.monotonic() - began
    assert kind == "DeadlineError", (kind, cause)
    assert "the source" in cause
    assert took_s < SHORT_S + patient(1)
    reader.link(up=True)
    _wait_silent(reader, 4 * SHORT_S)  # TCP waits twice as long for each further try
    late = reader.nbytes() - int(at_error)
    assert late > _SEGMENT_NBYTES, f"{late} bytes came late"
    _check_kept(reading)
    sys.stdout.write(f"link cut: after {took_s:.1f} s, {cause}; {late} bytes came later and did not land\n")
    whole(reader, offered)


def whole(reader: Host, offered: str) -> None:
    """Read all of it: every byte crosses the link, once."""
    before = reader.nbytes()
    reading = _start(reader, offered, WAIT_S)
    reading.hear()
    assert reading.hear() == "read"
    crossed = reader.nbytes() - before
    assert NBYTES < crossed < 1.05 * NBYTES, crossed
    reading.end()
    sys.stdout.write(f"read {NBYTES} bytes, {crossed} crossed\n")


def _start(reader: Host, offered: str, timeout_s: float) -> Process:
    process = Process(reader, "read")
    process.say(offered)
    process.say(str(timeout_s))
    return process


def _check_kept(reading: Process) -> None:
    """Check that memory that is used again has what was written to it since."""
    reading.say("look")
    assert reading.hear() == "kept"
    reading.end()


def _wait_ended(host: Host) -> None:
    """Wait until Mooncake's process has ended with its parent."""
    deadline = time.monotonic() + WAIT_S
    while host.count("python"):
        assert time.monotonic() < deadline, f"Mooncake still runs on {host.name}"
        time.sleep(0.1)  # another host's process sends no event


def _wait_silent(host: Host, seconds: float = 1.0) -> None:
    """Wait until the host has received nothing to speak of for so many seconds."""
    deadline = time.monotonic() + WAIT_S + seconds
    nbytes, since = host.nbytes(), time.monotonic()
    while time.monotonic() < since + seconds:
        assert time.monotonic() < deadline, f"{host.name} still receives"
        time.sleep(0.05)  # the kernel has no event for it
        if (now := host.nbytes()) - nbytes >= _SILENT_NBYTES:
            nbytes, since = now, time.monotonic()


def content() -> torch.Tensor:
    """Return the source's bytes, uint8[NBYTES], none of them 0."""
    return torch.from_numpy(np.random.default_rng(7).integers(1, 256, NBYTES, np.uint8))


def serve_it(address: str) -> None:
    """Serve the bytes until killed, or until the input ends."""
    buffer = SharedBuffer.create(NBYTES)
    buffer.tensor[:] = content()
    server = serve(buffer, "the source", address, "tcp")
    _say(base64.b64encode(pickle.dumps(server.offer)).decode())
    sys.stdin.read()
    server.close()
    buffer.close()


def read_it() -> None:
    """Read within a deadline. Says its process id once bytes land, and then what came of it."""
    offer: Offer = pickle.loads(base64.b64decode(sys.stdin.readline()))
    timeout_s, target = float(sys.stdin.readline()), SharedBuffer.create(NBYTES)
    reader = open_reader([target], {"the source": offer})
    assert reader.ways == {"the source": "tcp"}
    threading.Thread(target=_tell_landing, args=(target,), daemon=True).start()
    try:
        reader.read([Read("the source", 0, 0, 0, NBYTES)], timeout_s)
    except WeightSyncError as error:
        target.tensor.fill_(USED_AGAIN)  # at once, as `Reader.read` allows
        _say(f"{type(error).__name__} {COUNTER.read_text().strip()} {error}")
    else:
        _say("read" if torch.equal(target.tensor, content()) else "other bytes")
    for _ in sys.stdin:
        _say("kept" if bool((target.tensor == USED_AGAIN).all()) else "landed")
    reader.close()
    target.close()


def _tell_landing(target: SharedBuffer) -> None:
    """Say this process's id once bytes land in `target`."""
    while not target.tensor[::4096].any():
        time.sleep(0.005)  # Mooncake has no event for it
    _say(str(os.getpid()))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve_it(sys.argv[2])
    elif sys.argv[1:2] == ["read"]:
        read_it()
    else:
        sys.exit(main())
