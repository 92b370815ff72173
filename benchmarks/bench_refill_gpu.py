"""Refills an engine on GPUs from snapshots in host memory, against bare copies.

    python -m benchmarks.bench_refill_gpu [--gib 16] [--rounds 7] [--json FILE]

Every GPU has one trainer rank, read in place. With several GPUs, two engines have half of the GPUs. The first
engine is refilled from the snapshots of its own holders (``own``), the second from mapped snapshots of the
first engine's holders (``mapped``). With one GPU there is one engine.

A round poisons one engine, calls `heal`, and compares every element. ``read`` is the report's move: all ranks
at once, from the call until every byte is in live memory and digested. ``link`` is `cudaMemcpyAsync` of as
many bytes from page-locked memory to as many GPUs at once, by separate processes, in the same round.
``ratio`` is the ratio of the median rates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from benchmarks.cluster import gpu_uuids, kill, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.gpu_fleet import EngineFront, EngineRank, start_fleet
from benchmarks.models import Tensor, llama_like
from benchmarks.updates import check, config, new_version
from weightsync import SyncReport, WeightSync

_NUM_WARM = 2


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = environment()
    gpus = gpu_uuids()
    start_ray(len(gpus))
    try:
        rows = _measure(llama_like(args.gib), gpus, args.rounds)
    finally:
        ray.shutdown()
    print_table(f"{args.gib:g} GiB bf16, refilled", rows, where)
    if args.json:
        write_json(args.json, "refill_gpu", rows, where)


class Link:
    """Page-locked memory of one process, and a buffer on the process's GPU."""

    def __init__(self, nbytes: int) -> None:
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.copy()

    def copy(self) -> float:
        """Return the seconds of one copy to the device."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._device.copy_(self._host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started


def _measure(model: tuple[Tensor, ...], gpus: Sequence[str], num_rounds: int) -> list[dict[str, object]]:
    half = max(1, len(gpus) // 2)
    fleet = start_fleet(model, gpus, gpus[:half], "device")
    engines = {"own": (fleet.ranks, fleet.front)}
    if len(gpus) > 1:
        ranks = [
            spawn(EngineRank, model, i, half, None, gpu=gpu) for i, gpu in enumerate(gpus[half : 2 * half])
        ]
        engines["mapped"] = (ranks, spawn(EngineFront, ranks))
    links = [spawn(Link, sum(t.nbytes for t in model) // half, gpu=gpu) for gpu in gpus[:half]]
    rows = []
    with WeightSync(config(512, 2, keep_versions=2)) as sync:
        sync.register_trainers(fleet.trainers)
        sync.register_engines({name: front for name, (_, front) in engines.items()})
        sync.connect()
        version = new_version()
        fleet.prepare(version)
        sync.update_weights(version)
        started = time.perf_counter()
        sync.settle(120)
        kept_ms = (time.perf_counter() - started) * 1e3
        ray.get([trainer.change.remote(new_version()) for trainer in fleet.trainers])  # not read
        for name, (ranks, _) in engines.items():
            rounds = [_round(sync, name, ranks, links, version) for _ in range(_NUM_WARM + num_rounds)]
            rows.append(_row(name, rounds[_NUM_WARM:], half) | {"kept after ms": round(kept_ms, 1)})
    kill([*links, *(actor for its, front in engines.values() for actor in (*its, front))])
    fleet.close()
    return rows


def _round(
    sync: WeightSync, name: str, ranks: list[ActorHandle[Any]], links: list[ActorHandle[Any]], version: int
) -> tuple[SyncReport, float]:
    ray.get([rank.poison.remote() for rank in ranks])
    report = sync.heal(name)
    check(sum(ray.get([rank.wrong.remote(version) for rank in ranks])), name, version)
    return report, max(ray.get([link.copy.remote() for link in links]))


def _row(name: str, rounds: Sequence[tuple[SyncReport, float]], num_ranks: int) -> dict[str, object]:
    ways = {way for report, _ in rounds for way in report.ways.values()}
    assert ways == {name}, ways
    nbytes = sum(rounds[0][0].bytes_from.values()) / num_ranks
    reads = [nbytes / report.phases["move"] / 1e9 for report, _ in rounds]
    links = [nbytes / seconds / 1e9 for _, seconds in rounds]
    return {
        "way": name,
        "ranks": num_ranks,
        "GB per rank": nbytes / 1e9,
        "read ms": statistics.median(report.phases["move"] for report, _ in rounds) * 1e3,
        "heal ms": statistics.median(report.seconds for report, _ in rounds) * 1e3,
        "read GB/s per rank": statistics.median(reads),
        "range": f"{min(reads):.1f}-{max(reads):.1f}",
        "link GB/s per rank": statistics.median(links),
        "ratio": statistics.median(reads) / statistics.median(links),
    }


if __name__ == "__main__":
    main()
