"""Two hosts that meet without Ray: unshare … python -m tests.hosts.pair SUBNET [astray].

Run so, it makes the hosts and starts itself on both as ``host RANK ADDRESS``. Rank 0 tells rank 1 where it
serves, by a line that the outside passes on.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.hosts.network import Network
from tests.patience import patient
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import BufferHandle
from weightsync.readers import Read, open_reader, serve
from weightsync.readers.mooncake_process import probe
from weightsync.recipes.training.trainer import join_ranks, rendezvous
from weightsync.transports import Broadcast, transport_class

PORTS = 29600, 29699
NBYTES = 1 << 20
WAIT_S = patient(10)
END_S = patient(30)  # the hosts and what runs on them end with this process


def main(subnet: str, *astray: str) -> int:
    """Return how many ranks failed."""
    network = Network(("first", "second"), subnet)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks = []
    for rank, host in enumerate(network.hosts.values()):
        if astray:
            host.mislead()
        if rank == 1:
            # Rank 0's process id has to be free here, so rank 1 and its threads get later ones.
            assert host.start(["sh", "-c", "echo 1000 > /proc/sys/kernel/ns_last_pid"]).wait() == 0
        command = [sys.executable, "-m", "tests.hosts.pair", "host", str(rank), host.address]
        ranks.append(host.start(command, **pipes))
    one, other = ranks
    assert one.stdout
    assert other.stdin
    other.stdin.write(one.stdout.readline())
    other.stdin.flush()
    said = [rank.communicate(timeout=END_S)[0] for rank in reversed(ranks)]
    sys.stdout.write("".join(said))
    return sum(rank.returncode != 0 for rank in ranks)


def rank_0(address: str) -> None:
    """Serve one of each, until rank 1 has used them all."""
    transport, buffer = transport_class("gloo")(), SharedBuffer.create(NBYTES)
    buffer.tensor[:] = torch.arange(NBYTES).to(torch.uint8)
    protocols = ["zeromq"] if probe("tcp", "") else ["zeromq", "tcp"]
    servers = [serve(buffer, protocol, address, protocol, "", PORTS) for protocol in protocols]
    store, meeting = rendezvous(address, PORTS)
    told = transport.offer(address, PORTS), [server.offer for server in servers], meeting
    sys.stdout.write(base64.b64encode(pickle.dumps(told)).decode() + "\n")
    sys.stdout.flush()
    transport.open(told[0], 0, 2, WAIT_S)
    transport.start([Broadcast(buffer.tensor, 0)]).wait()
    _train(store, meeting, 0)
    transport.start([Broadcast(buffer.tensor, 1)]).wait()  # rank 1 has read everything
    for each in (*servers, transport, buffer):
        each.close()


def rank_1(_: str) -> None:
    """Receive and read what rank 0 has, on every way."""
    meeting, offers, trainers = pickle.loads(base64.b64decode(sys.stdin.readline()))
    transport, target = transport_class("gloo")(), SharedBuffer.create(NBYTES)
    wanted = torch.arange(NBYTES).to(torch.uint8)
    transport.open(meeting, 1, 2, WAIT_S)
    transport.start([Broadcast(target.tensor, 0)]).wait()
    assert torch.equal(target.tensor, wanted)
    for offer in offers:
        target.tensor.zero_()
        with taken(offer.memory), contextlib.closing(open_reader([target], {offer.holder: offer})) as reader:
            assert reader.ways == {offer.holder: offer.protocol}
            reader.read([Read(offer.holder, 0, 0, 0, NBYTES)], WAIT_S)
        assert torch.equal(target.tensor, wanted), offer.holder
        sys.stdout.write(f"read over {offer.protocol} from {offer.endpoint}\n")
    _train(None, trainers, 1)
    transport.start([Broadcast(target.tensor, 1)]).wait()
    for each in (transport, target):
        each.close()


@contextlib.contextmanager
def taken(memory: BufferHandle) -> Iterator[None]:
    """Let another process have the process id and descriptor of `memory` on this host, for other memory."""
    other = SharedBuffer.create(memory.nbytes)
    hold = f"import os; os.dup2({other.fileno()}, {memory.fd}); print(os.getpid(), flush=True); input()"
    with _start_as(memory.pid, [sys.executable, "-c", hold], other.fileno()) as process:
        assert process.stdout
        assert int(process.stdout.readline()) == memory.pid
        try:
            yield
        finally:
            process.kill()
    other.close()


def _start_as(pid: int, command: list[str], fd: int) -> subprocess.Popen[str]:
    """Start a process with this id. A thread that starts in between may take it: then try again."""
    deadline = time.monotonic() + WAIT_S
    while True:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes, pass_fds=[fd], text=True)
        if process.pid == pid:
            return process
        process.kill()
        process.communicate()
        assert time.monotonic() < deadline, f"something on this host has process id {pid}"


def _train(store: TCPStore | None, meeting: tuple[str, int], rank: int) -> None:
    """Do what the ranks of a recipe's trainer do."""
    join_ranks(store, *meeting, "gloo", rank, 2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "host":
        (rank_0, rank_1)[int(sys.argv[2])](sys.argv[3])
    else:
        sys.exit(main(*sys.argv[1:]))
