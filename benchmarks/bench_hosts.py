"""Times updates between two hosts over sockets, against bare sends. Two GPUs of this host act as hosts.

    python -m benchmarks.bench_hosts --engine vllm --model 8b
    python -m benchmarks.bench_hosts --engine vllm --model 8b --changed 1 5 30    staged, as deltas and whole
    python -m benchmarks.bench_hosts --cpu --engine torch --model tiny      on a CPU, as a smoke test

Ray has two nodes, which are hosts to weightsync: a trainer on a node with the first GPU, and a real engine
with dummy weights on a node with the second GPU. NCCL may use neither NVLink, nor PCIe, nor shared memory
(``NCCL_P2P_DISABLE``, ``NCCL_SHM_DISABLE``, ``NCCL_IB_DISABLE``), so every byte uses a socket. Before an
update the trainer gets new weights and the engine 0xFF, and afterwards every element is compared. This
preparation and comparison are not timed.

  direct     messages as planned between hosts, unpacked into live weights
  broadcast  buckets, copied into live weights
  bare       the same number of bytes by ``torch.distributed.send`` and ``recv``, in messages of a bucket,
             between two processes on the same GPUs and nodes, in turns with the updates
  share      bare / move: `move` is the phase in which bytes arrive, are written and are digested
  sockets    bytes that this host's interfaces received in one update, by ``/proc/net/dev``

With ``--changed``, versions are staged, and engines serve meanwhile (``stage="auto"``). Each row has versions
in which so many percent of the elements changed at random places. In the first and in the last row everything
changed; the first version finds no version before.

  way      how holders read parts, as in `SyncReport.ways`: with ``delta``, only what changed. With ``--deltas
           auto``, the fleet chose this by the link's rate
  stage    the phase in which a delta is made, sent and used, or the whole version sent, and digests compared
  pause    from the first call to pause until the engine serves: the phases after `stage`
  sent     bytes of deltas, or of whole parts

Holders are kept from mapping each other's memory. The link is this host's loopback. For a slower link, run
the command in a network namespace:

    unshare --net sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 10gbit burst 4mb latency 1s \
      && python -m benchmarks.bench_hosts ...'

Medians, without the first round of each way; with ``--changed``, see `staged_hosts.rows`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.actor import ActorHandle

from benchmarks import staged_hosts
from benchmarks.cluster import kill, ray_nodes, spawn
from benchmarks.isolate import asked, emit, measure_engine, stage
from benchmarks.latency_rig import Rig, start
from benchmarks.updates import Mode, Round, check, config, new_version, spread, update_row
from weightsync import SyncConfig, WeightSync

__all__ = ["main"]

_SOCKETS_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
_WAYS: Mapping[str, Mode] = {"direct": "auto", "broadcast": "broadcast"}
_COLUMNS = (
    *("engine", "way", "route", "total ms", "total range", "move ms", "bare ms", "bare range"),
    *("share", "sockets GB", "GB", "bare GB/s"),
)


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    if "--part" in sys.argv:
        _run_part(asked())
        return
    args = _parser().parse_args()
    columns = staged_hosts.COLUMNS if args.changed else _COLUMNS
    measure_engine("benchmarks.bench_hosts", args, "hosts", "two hosts over sockets", columns)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang", "torch"])
    parser.add_argument("--model", default="8b", choices=["1b", "8b", "100m", "tiny"])
    parser.add_argument("--way", nargs="+", default=[*_WAYS], choices=_WAYS)
    parser.add_argument("--changed", nargs="+", type=float, help="percent; measure staged updates alone")
    parser.add_argument("--deltas", default="always", choices=["auto", "always"], help="with --changed")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share of a GPU for the engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="without GPUs: a smoke test, by broadcast alone")
    parser.add_argument("--part-timeout", type=float, default=400, help="seconds for everything")
    parser.add_argument("--json", type=Path)
    return parser


def _run_part(spec: Mapping[str, Any]) -> None:
    os.environ |= _SOCKETS_ONLY
    cpu, bucket_mib = spec["cpu"], spec["bucket_mib"]
    settings = replace(config(bucket_mib, 2), timeout_s=240)
    if spec["changed"]:
        settings = staged_hosts.settings(bucket_mib, spec["deltas"])
    with ray_nodes(0 if cpu else 2, 2) as nodes:
        stage("starting the engine and the trainer")
        apart = nodes[0], nodes[1]
        rig = start(
            spec["engine"], spec["model"], 1, spec["gpu_memory"], cpu=cpu, config=settings, nodes=apart
        )
        with rig as started:
            for row in _rows(started, spec, settings, apart):
                emit({"engine": f"{spec['engine']} {spec['model']}", **row})


def _rows(
    rig: Rig, spec: Mapping[str, Any], settings: SyncConfig, nodes: tuple[str, str]
) -> Iterator[dict[str, object]]:
    if spec["changed"]:
        yield from staged_hosts.rows(rig, spec["changed"], spec["rounds"], _received)
        return
    stage("starting bare processes")
    bare = _Bare(nodes, cpu=spec["cpu"])
    for way in spec["way"]:
        if not (spec["cpu"] and way == "direct"):
            yield {"way": way, **_measure(rig, way, settings, bare, spec["rounds"])}
    bare.end()


def _measure(rig: Rig, way: str, settings: SyncConfig, bare: _Bare, num_rounds: int) -> dict[str, object]:
    rounds: list[Round] = []
    alone: list[float] = []
    sockets: list[int] = []
    with WeightSync(replace(settings, mode=_WAYS[way])) as sync:
        mine = replace(rig, sync=sync)
        stage(f"{way}: connecting")
        mine.connect()
        for _ in range(num_rounds + 1):
            version = new_version()
            mine.prepare(version)
            before = _received()
            rounds.append(mine.ours())
            sockets.append(_received() - before)
            check(mine.wrong(version), way, version)
            alone.append(bare.send(rig.nbytes, settings.bucket_bytes))
            stage(f"{way}: {rounds[-1].seconds:.2f} s, bare {alone[-1]:.2f} s")
    row = update_row(rounds[1:]) | spread("bare", alone[1:])
    row["share"] = statistics.median(alone[1:]) * 1e3 / float(str(row["move ms"]))
    row["sockets GB"] = statistics.median(sockets[1:]) / 1e9
    row["bare GB/s"] = rig.nbytes / statistics.median(alone[1:]) / 1e9
    return row


def _received() -> int:
    """Return the bytes that all interfaces of this host have received."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


class _BareRank:
    """One of two processes that send and receive, and do nothing else."""

    def join(self, meeting: str, rank: int) -> None:
        """Join the other process."""
        backend, device = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
        self._rank, self._device = rank, device
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=2)

    def move(self, nbytes: int, message: int) -> float:
        """Move `nbytes` from rank 0 to rank 1. Returns seconds from a barrier to the last byte here."""
        data = torch.zeros(min(nbytes, message), dtype=torch.uint8, device=self._device)
        call = dist.recv if self._rank else dist.send
        dist.barrier()
        self._wait()
        begun = time.perf_counter()
        for part in _messages(data, nbytes):
            call(part, 1 - self._rank)
        self._wait()
        return time.perf_counter() - begun

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def _messages(data: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
    for at in range(0, nbytes, len(data)):
        yield data[: nbytes - at]


class _Bare:
    """Bare sends from the first node to the second."""

    def __init__(self, nodes: Sequence[str], *, cpu: bool) -> None:
        meeting = tempfile.mktemp(prefix="weightsync-bench-")
        self._ranks: list[ActorHandle[Any]] = [
            spawn(_BareRank, gpu=None if cpu else str(rank), node=node) for rank, node in enumerate(nodes)
        ]
        ray.get([each.join.remote(meeting, rank) for rank, each in enumerate(self._ranks)], timeout=120)

    def send(self, nbytes: int, message: int) -> float:
        """Return the seconds of `nbytes`, by the receiver's clock."""
        seconds: list[float] = ray.get([each.move.remote(nbytes, message) for each in self._ranks])
        return seconds[1]

    def end(self) -> None:
        kill(self._ranks)


if __name__ == "__main__":
    main()
