"""A newcomer that reads a version from one host, from three, and from three of which one dies.

unshare … python -m tests.hosts.sources PROTOCOL. Run so, it makes the hosts and starts itself on each, as
``serve ADDRESS PROTOCOL`` or ``read``.
"""

from __future__ import annotations

import ast
import base64
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.hosts.network import Host, Network
from tests.patience import patient
from weightsync.holder.refill import Refill
from weightsync.holder.snapshots import SnapshotStore
from weightsync.memory.host import SharedBuffer
from weightsync.plan.broadcast.plan import Portion
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Snapshot, SnapshotHeader

HEADER = SnapshotHeader(version=7, layout="whole", part=0)
BUCKET_NBYTES, NUM_BUCKETS = 8 << 20, 6
NBYTES = NUM_BUCKETS * BUCKET_NBYTES
MBIT_PER_S = 200
WAIT_S = patient(30)


def main(protocol: str) -> int:
    """Print the seconds of each refill, and how much faster three sources are. Returns 0."""
    network = Network(("first", "second", "third", "newcomer"))
    *sources, newcomer = network.hosts.values()
    for host in sources:
        host.set_sending_rate(MBIT_PER_S)
    serving = [_start(host, "serve", host.address, protocol) for host in sources]
    offers = [_offer(process) for process in serving]
    alone_s = _read(newcomer, offers[:1])
    together_s = _read(newcomer, offers)
    reading = _start(newcomer, "read")
    _tell(reading, offers)
    assert reading.stdout
    assert reading.stdout.readline() == "bucket 0\n"
    assert sources[0].start(["kill", "-9", str(offers[0].memory.pid)]).wait(WAIT_S) == 0
    assert reading.wait(WAIT_S) == 0
    of_each = ast.literal_eval(reading.stdout.read().splitlines()[-1].partition(" ")[2])
    assert 0 < of_each["first"] < NBYTES // 3, of_each
    assert newcomer.nbytes() > 3 * NBYTES, "not all bytes crossed its link"
    sys.stdout.write(
        f"one source {alone_s:.2f} s, three {together_s:.2f} s: {alone_s / together_s:.2f} times; "
        f"one killed: {of_each}\n"
    )
    return 0


def _start(host: Host, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.hosts.sources", *arguments]
    return host.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _offer(process: subprocess.Popen[str]) -> Offer:
    assert process.stdout
    offer: Offer = pickle.loads(base64.b64decode(process.stdout.readline()))
    return offer


def _tell(process: subprocess.Popen[str], offers: Sequence[Offer]) -> None:
    assert process.stdin
    process.stdin.write(base64.b64encode(pickle.dumps(offers)).decode() + "\n")
    process.stdin.flush()


def _read(newcomer: Host, offers: Sequence[Offer]) -> float:
    """Return the seconds of a refill from `offers`."""
    process = _start(newcomer, "read")
    _tell(process, offers)
    said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    return float(said.splitlines()[-1].split()[0])


def content() -> torch.Tensor:
    """Return the version's bytes, uint8[NBYTES]."""
    return torch.from_numpy(np.random.default_rng(5).integers(0, 256, NBYTES, np.uint8))


class Whole:
    """Content of a snapshot."""

    nbytes = NBYTES

    def save(self, to: torch.Tensor) -> None:
        to.copy_(content())


class Sink:
    """A `RefillSink` into host memory."""

    num_buckets = NUM_BUCKETS

    def __init__(self) -> None:
        self.targets = [SharedBuffer.create(BUCKET_NBYTES) for _ in range(2)]
        self.found = torch.zeros(NBYTES, dtype=torch.uint8)

    def portions(self, bucket: int) -> Sequence[Portion]:
        return [Portion(0, bucket * BUCKET_NBYTES, 0, BUCKET_NBYTES)]

    def wait_free(self, bucket: int) -> None: ...

    def land(self, bucket: int) -> None:
        first = bucket * BUCKET_NBYTES
        self.found[first : first + BUCKET_NBYTES] = self.targets[bucket % 2].tensor
        sys.stdout.write(f"bucket {bucket}\n")
        sys.stdout.flush()

    def finish(self) -> None: ...


def serve(address: str, protocol: str) -> None:
    """Serve the version until killed."""
    name = Path("/proc/sys/kernel/hostname").read_text().strip()
    store = SnapshotStore(name, address, protocol, "")
    offer = store.snapshot(HEADER, np.zeros(3, np.uint64), Whole())
    sys.stdout.write(base64.b64encode(pickle.dumps(offer)).decode() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def read() -> None:
    """Refill from the offers on stdin. Prints each bucket, then the seconds and each source's bytes."""
    offers: Sequence[Offer] = pickle.loads(base64.b64decode(sys.stdin.readline()))
    sink, wanted = Sink(), content()
    refill = Refill(Snapshot(HEADER.version, HEADER.layout, {0: offers}), sink, False, WAIT_S)
    begun = time.perf_counter()
    refilled = refill.run()
    took_s = time.perf_counter() - begun
    refill.close()
    assert torch.equal(sink.found, wanted)
    assert sum(refilled.bytes_from.values()) == NBYTES
    sys.stdout.write(f"{took_s:.3f} {refilled.bytes_from}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3])
    elif sys.argv[1:2] == ["read"]:
        read()
    else:
        sys.exit(main(sys.argv[1]))
