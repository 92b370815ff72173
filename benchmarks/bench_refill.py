"""Reads a buffer from peers on this host in all ways, against bare Mooncake.

    python -m benchmarks.bench_refill [--mib 1024] [--peers 1 2] [--rounds 9] [--json FILE]

Every peer is a process that serves the same bytes over ZeroMQ and, if Mooncake loads, over Mooncake's TCP.
This process reads equal parts from all peers at once,

- ``mapped``, ``zeromq``, ``curve``, ``tcp``: through `weightsync.readers`, TCP being Mooncake's;
- ``Mooncake sync``, ``Mooncake async``: by bare Mooncake, in a process that only uses our memory, from the
  same memory as ``tcp``: one `batch_transfer_sync_read` per peer, in threads, and
  `batch_transfer_async_read` with as many pieces in flight as ours, polled in the same way.

The ways take turns, round after round. Connections exist before a timed call. Before the call the target is
filled with 0xFF, afterwards every byte is compared. ``ratio`` is the median throughput over the throughput of
the better bare call. Medians, with minimum and maximum, without the first two rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.common import environment, print_table, write_json
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.readers import Read, open_reader, serve
from weightsync.readers.mooncake import PIECE_NBYTES
from weightsync.readers.mooncake_child import MAX_PAUSE_S, MIN_PAUSE_S, WINDOW
from weightsync.readers.mooncake_process import probe

_TIMEOUT_S = 120.0
_BARE = ("Mooncake sync", "Mooncake async")

Piece = tuple[str, int, int, int]
"""Endpoint, remote address, local address, bytes."""


class Bare(Protocol):
    """Types of Mooncake's calls, which return 0 for success, or a batch's number."""

    def batch_transfer_sync_read(
        self, endpoint: str, ours: Sequence[int], theirs: Sequence[int], sizes: Sequence[int]
    ) -> int: ...

    def batch_transfer_async_read(
        self, endpoint: str, ours: Sequence[int], theirs: Sequence[int], sizes: Sequence[int]
    ) -> int: ...

    def transfer_check_status(self, batch: int) -> int: ...


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = environment(("torch", "numpy", "zmq"))
    problem = probe("tcp", "")
    notes = [f"without Mooncake: {problem}"] if problem else []
    rows = [
        row
        for num_peers in args.peers
        for row in _measure(args.mib << 20, num_peers, args.rounds, not problem)
    ]
    print_table(f"{args.mib} MiB read from peers on this host", rows, where, notes)
    if args.json:
        write_json(args.json, "refill", rows, where, notes)


def _measure(nbytes: int, num_peers: int, num_rounds: int, mooncake: bool) -> list[dict[str, object]]:
    part = nbytes // num_peers // 4096 * 4096
    protocols = ["zeromq", "curve", *(["tcp"] if mooncake else [])]
    wanted = _content(part * num_peers)
    with ExitStack() as stack:
        target = SharedBuffer.create(part * num_peers)
        stack.callback(target.close)
        peers = [_spawn(stack, _serve, f"peer {i}", part * num_peers, protocols) for i in range(num_peers)]
        offers: list[dict[str, Offer]] = [peer.recv() for peer in peers]
        reads = [Read(f"peer {i}", i * part, 0, i * part, part) for i in range(num_peers)]
        calls: dict[str, Callable[[], object]] = {}
        for way in ("mapped", *protocols):
            protocol = "zeromq" if way == "mapped" else way
            its = {f"peer {i}": offer[protocol] for i, offer in enumerate(offers)}
            reader = open_reader([target], its, may_map=way == "mapped")
            stack.callback(reader.close)
            calls[way] = partial(reader.read, reads, _TIMEOUT_S)
        if mooncake:
            bare = _spawn(stack, _read_bare, target.handle, [offer["tcp"] for offer in offers], part)
            for way in _BARE:
                calls[way] = partial(_order, bare, way)
        seconds = _interleave(calls, num_rounds, target.tensor, wanted)
    return _rows(num_peers, part * num_peers, seconds)


def _interleave(
    calls: Mapping[str, Callable[[], object]], num_rounds: int, target: torch.Tensor, wanted: torch.Tensor
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(num_rounds + 2):
        for way, call in calls.items():
            target.fill_(0xFF)
            started = time.perf_counter()
            call()
            seconds[way].append(time.perf_counter() - started)
            assert torch.equal(target, wanted), way
    return {way: each[2:] for way, each in seconds.items()}


def _rows(num_peers: int, nbytes: int, seconds: Mapping[str, Sequence[float]]) -> list[dict[str, object]]:
    rates = {way: [nbytes / 2**20 / each for each in its] for way, its in seconds.items()}
    best = max((statistics.median(rates[way]) for way in _BARE if way in rates), default=0.0)
    rows = []
    for way, its in rates.items():
        median = statistics.median(its)
        row: dict[str, object] = {"peers": num_peers, "way": way, "MiB/s": round(median)}
        row["range"] = f"{min(its):.0f}-{max(its):.0f}"
        rows.append(row | ({"ratio": round(median / best, 3)} if best else {}))
    return rows


def _content(nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes // 8) * 0x1E3779B97F4A7C15).view(torch.uint8)


def _spawn(stack: ExitStack, work: Callable[..., None], *args: object) -> Connection:
    """Run ``work(connection, *args)`` in a process that ends with the stack."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *args))
    process.start()
    stack.callback(process.join)
    stack.callback(ours.close)
    theirs.close()
    return ours


def _serve(connection: Connection, name: str, nbytes: int, protocols: Sequence[str]) -> None:
    """Serve the bytes of one peer."""
    buffer = SharedBuffer.create(nbytes)
    buffer.tensor.copy_(_content(nbytes))
    servers = [serve(buffer, name, "127.0.0.1", protocol) for protocol in protocols]
    connection.send({server.offer.protocol: server.offer for server in servers})
    _until_closed(connection)
    for server in servers:
        server.close()


def _read_bare(connection: Connection, handle: BufferHandle, offers: Sequence[Offer], part: int) -> None:
    """Read with Mooncake alone into our memory."""
    os.environ["MC_FORCE_TCP"] = "1"
    from mooncake.engine import TransferEngine

    target = SharedBuffer.open(handle)
    here = target.tensor.data_ptr()
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(here, handle.nbytes) == 0
    parts = [
        [
            (offer.endpoint, offer.base + i * part + at, here + i * part + at, min(PIECE_NBYTES, part - at))
            for at in range(0, part, PIECE_NBYTES)
        ]
        for i, offer in enumerate(offers)
    ]
    read = {"Mooncake sync": _sync, "Mooncake async": _async}
    while (way := _until_closed(connection)) is not None:
        read[way](engine, parts)
        connection.send("done")
    os._exit(0)  # Mooncake's engine takes a second to end


def _sync(engine: Bare, parts: Sequence[Sequence[Piece]]) -> None:
    def one(pieces: Sequence[Piece]) -> int:
        endpoints, theirs, ours, sizes = zip(*pieces, strict=True)
        return engine.batch_transfer_sync_read(endpoints[0], ours, theirs, sizes)

    with ThreadPoolExecutor(len(parts)) as threads:
        assert not any(threads.map(one, parts))


def _async(engine: Bare, parts: Sequence[Sequence[Piece]]) -> None:
    start, check = engine.batch_transfer_async_read, engine.transfer_check_status
    todo = [deque(pieces) for pieces in parts]
    flying: list[set[int]] = [set() for _ in parts]
    pause = MIN_PAUSE_S
    while any(todo) or any(flying):
        num_over = 0
        for queue, batches in zip(todo, flying, strict=True):
            while queue and len(batches) < WINDOW:
                endpoint, theirs, ours, size = queue.popleft()
                batches.add(start(endpoint, [ours], [theirs], [size]))
            over = {batch for batch in batches if check(batch) == 1}
            batches -= over
            num_over += len(over)
        pause = MIN_PAUSE_S if num_over else min(1.5 * pause, MAX_PAUSE_S)
        if not num_over:
            time.sleep(pause)


def _order(bare: Connection, way: str) -> None:
    bare.send(way)
    assert bare.poll(_TIMEOUT_S), way
    bare.recv()


def _until_closed(connection: Connection) -> str | None:
    """Return the next order, or None if the other side is gone."""
    try:
        order: str = connection.recv()
    except EOFError:
        return None
    return order


if __name__ == "__main__":
    main()
