"""Times `update_weights` from DeepSpeed ZeRO-3 and Megatron-Core, with weights read in place.

    python -m benchmarks.bench_trainers [--world 2] [--trainer zero3 megatron-tp megatron-ep] [--rounds 7]
        [--layers N] [--json FILE]

Every GPU has one trainer rank and one rank of an engine that only holds weights, cut as by tensor
parallelism. ``zero3`` has Qwen3-8B, and both Megatron trainers have 12 layers of Qwen3-30B-A3B: 16 GB.
``gathered`` is OpenRLHF's way with ZeRO-3 on shared GPUs, on the same fleet, in turns with ours: parameters
are gathered, cloned and mapped by the engine, which copies a slice; no loader runs.

Before a round the trainers write other values and the engine's memory is filled with 0xFF. Afterwards every
element is compared. This preparation and comparison are not timed. The clock of both ways runs from the
driver's call to the return. Phases are of our way, which also verifies. ``floor ms`` and ``share`` are
explained in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.bench_gpu import shown
from benchmarks.cluster import gpu_uuids, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.gpu_fleet import EngineRank, Fleet, Model, start_engine
from benchmarks.isolate import emit, run_part, stage
from benchmarks.models import model_of, shape_of
from benchmarks.trainer_ranks import MegatronRank, ZeroRank
from benchmarks.updates import check, config, connect, floor, new_version, spread, timed_rounds, update_row
from weightsync import WeightSync
from weightsync.memory.tensors import device_id

__all__ = ["main"]

_TRAINERS = ("zero3", "megatron-tp", "megatron-ep")
_NUM_LAYERS = 12


class MappingRank(EngineRank):
    """An engine rank that OpenRLHF's trainers can feed, too."""

    def update_weight(self, name: str, handles: dict[str, Any]) -> None:
        """Copy this rank's slice of a whole tensor, mapped from this rank's GPU."""
        rebuild, arguments = handles[device_id(self.device)]
        whole = rebuild(*arguments)
        (box,) = (box for tensor, box in self.held if tensor.name == name)
        self.live[name].copy_(whole[box.slices()])
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, measure trainers in separate processes, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help="number of GPUs (all)")
    parser.add_argument("--trainer", nargs="+", default=_TRAINERS, choices=_TRAINERS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part-timeout", type=float, default=240, help="seconds for each trainer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.part:
        _run_part(**json.loads(args.part))
        return
    where, done, notes = environment(), [], []
    for trainer in args.trainer:
        spec = {"trainer": trainer, "world": args.world or len(gpu_uuids()), "rounds": args.rounds}
        rows, trouble = run_part(
            "benchmarks.bench_trainers", spec | {"layers": args.layers}, args.part_timeout
        )
        done += rows
        notes += [trouble] if trouble else []
        if args.json:
            write_json(args.json, "trainers", done, where, notes)
    print_table("update_weights", [shown(row) for row in done], where, notes)


def _run_part(trainer: str, world: int, rounds: int, layers: int | None) -> None:
    stage("Ray starts")
    start_ray(world)
    try:
        fleet = _fleet(trainer, gpu_uuids()[:world], layers)
        stage("filled and compared")
        version = new_version()
        fleet.prepare(version)
        fleet.wrong(version)
        with WeightSync(config(256, 2)) as sync:
            sync.register_trainers(fleet.trainers)
            sync.register_engines({"engine": fleet.front})
            connect(sync)
            timed = list(timed_rounds(sync, fleet, rounds))
            emit({"trainer": trainer, "way": "in place", **update_row(timed), **floor(sync.links(), timed)})
        if trainer == "zero3":
            emit({"trainer": trainer, "way": "gathered", **_gathered(fleet, min(rounds, 3))})
        fleet.close()
    finally:
        ray.shutdown()


def _fleet(trainer: str, gpus: Sequence[str], layers: int | None) -> Fleet:
    meeting = tempfile.mktemp(prefix="weightsync-bench-")
    model: Model
    if trainer == "zero3":
        model = model_of("8b", num_layers=layers)
        given: tuple[object, ...] = (model,)
        cls: type = ZeroRank
    else:
        shape = shape_of("moe", layers or _NUM_LAYERS)
        model = model_of("moe-stacked", num_layers=layers or _NUM_LAYERS)
        sizes = (len(gpus), 1) if trainer == "megatron-tp" else (1, len(gpus))
        given, cls = (shape, *sizes), MegatronRank
    stage(f"{len(model)} tensors are made")
    trainers = [spawn(cls, rank, len(gpus), meeting, *given, gpu=gpu) for rank, gpu in enumerate(gpus)]
    ray.get([each.used.remote() for each in trainers])
    return start_engine(model, trainers, gpus, MappingRank)


def _gathered(fleet: Fleet, rounds: int) -> dict[str, object]:
    """Time OpenRLHF's way, after one round to warm up."""
    seconds = []
    for number in range(rounds + 1):
        version = new_version()
        fleet.prepare(version)
        stage(f"gathered, round {number}")
        started = time.perf_counter()
        ray.get([each.broadcast.remote(fleet.ranks) for each in fleet.trainers])
        seconds.append(time.perf_counter() - started)
        check(fleet.wrong(version), "gathered", version)
    return spread("total", seconds[1:])


if __name__ == "__main__":
    main()
