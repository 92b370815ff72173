"""Times `update_weights` on GPUs by source, placement, bucket size and slots, against bare rates.

    python -m benchmarks.bench_sync --gpu [--world 1 2 4] [--source device host]
        [--bucket-mib 256 512]
        [--slots 2 3] [--model 8b|llama|moe|moe-stacked] [--gib 16] [--rounds 7] [--empty] [--long 200]
        [--head-start 10] [--join]

One trainer rank and one engine rank per GPU. ``colocated`` shares each of `world` GPUs between both,
``disaggregated`` gives the first half of the GPUs to trainers, the second half to the engine. Trainers cut
tensors along the first dimension, the engine as tensor parallelism does. Before a round the trainers write
other values and the engine's memory is filled with 0xFF. After the round every element is compared. This
preparation and comparison are not timed.

Clocks: ``total`` is the wall clock of `update_weights`, from the call until every rank serves the
version, with Ray's calls, digests of both sides and their comparison. Phases are the report's.
Connecting is not included: memory, communicators and mappings are made once. ``connect s`` is the wall clock
of connecting, which begins `--head-start` seconds after registration. Holders start in this time, in which
real engines load. With `--join` the engine is killed after the last round. Another engine, which has started,
replaces it, and is filled from copies on the host, which holders then store. ``join s`` is the wall clock of
`add_engine`. ``bare`` rows run from a barrier until the last rank has one bucket, the same calls in the same
processes round after round.
``extra MiB`` is device memory that all processes allocated on the fullest GPU since before connecting,
with the holder's CUDA context (some 500 MiB) and NCCL's memory. benchmarks/README.md explains
``floor ms`` and ``share``. The file also has the last report of each row, with the cost of connecting.

Every fleet (source x world x placement) is a process with a time limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.cluster import gpu_uuids, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.gpu_bare import bare_rates
from benchmarks.gpu_fleet import Fleet, Model, start_engine, start_fleet
from benchmarks.isolate import emit, run_part, stage
from benchmarks.models import model_of
from benchmarks.updates import (
    MODES,
    Mode,
    Round,
    WrongWeightsError,
    check,
    config,
    connect,
    floor,
    new_version,
    timed_rounds,
    update_row,
)
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.errors import DeadlineError, WeightSyncError

__all__ = ["main", "shown"]

_LONG_MARKS = (10, 100, 200)
_Slots = list[str | None]
"""GPUs. None is a CPU slot."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, measure part by part, print and write the result."""
    args = _parser().parse_args(argv)
    if args.part:
        _run_part(json.loads(args.part))
        return
    gpus = gpu_uuids()
    worlds = args.world or ([len(gpus)] if gpus else [2])
    where = environment()
    tables: dict[str, list[dict[str, object]]] = {}
    notes: list[str] = []
    for spec in _parts(args, worlds, cpu=args.cpu):
        rows, trouble = run_part("benchmarks.bench_gpu", spec, args.part_timeout)
        notes += [trouble] if trouble else []
        for row in rows:
            tables.setdefault(str(row["table"]), []).append(row)
            print(json.dumps(shown(row)), flush=True)
        if args.json:  # write after each part, as a later one may be cut off
            done = [row for found in tables.values() for row in found]
            write_json(args.json, "sync-gpu", done, where, notes)
    for title, rows in tables.items():
        print_table(title, [shown(row) for row in rows], where, notes)
    if not tables:
        print("\n".join(notes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_sync --gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, nargs="+", help="numbers of GPUs (all)")
    parser.add_argument("--placement", nargs="+", default=["colocated"], choices=_PLACEMENTS)
    parser.add_argument("--source", nargs="+", default=["device", "host"], choices=["device", "host"])
    parser.add_argument("--mode", nargs="+", default=["auto"], choices=MODES)
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[256])
    parser.add_argument("--slots", type=int, nargs="+", default=[2])
    parser.add_argument("--model", default="llama", choices=["8b", "llama", "moe", "moe-stacked", "tiny"])
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--empty", action="store_true", help="also a model of a few kilobytes")
    parser.add_argument("--long", type=int, default=0, help="also this many updates, memory watched")
    parser.add_argument("--head-start", type=float, default=0.0, help="seconds before connecting")
    parser.add_argument("--join", action="store_true", help="at last, kill the engine and add another")
    parser.add_argument("--no-bare", action="store_true", help="without the collectives called bare")
    parser.add_argument("--cpu", action="store_true", help="slots of this host instead of GPUs: a smoke test")
    parser.add_argument("--part-timeout", type=float, default=240, help="seconds for each part")
    parser.add_argument("--json", type=Path)
    return parser


_PLACEMENTS = ("colocated", "disaggregated")


def _parts(args: argparse.Namespace, worlds: Sequence[int], *, cpu: bool) -> Iterator[dict[str, Any]]:
    """Yield the spec of each process."""
    common = {"gib": args.gib, "layers": args.layers, "rounds": args.rounds, "cpu": cpu}
    common |= {
        "mode": args.mode,
        "bucket_mib": args.bucket_mib,
        "slots": args.slots,
        "head_start": args.head_start,
        "join": args.join,
    }
    for world in worlds:
        if world > 1 and not (args.no_bare or cpu):
            yield {"kind": "bare", "world": world, **common}
        for source, placement in itertools.product(args.source, args.placement):
            if placement == "disaggregated" and world < 2:
                continue
            fleet = {"world": world, "source": source, "placement": placement, **common}
            yield {"kind": "matrix", "model": args.model, **fleet}
        fleet = {"world": world, "source": args.source[0], "placement": args.placement[0], **common}
        fleet |= {"mode": args.mode[:1], "bucket_mib": args.bucket_mib[:1], "slots": args.slots[:1]}
        if args.empty:
            yield {"kind": "empty", "model": "tiny", **fleet, "rounds": max(args.rounds, 30)}
        if args.long:
            yield {"kind": "long", "model": args.model, **fleet, "rounds": args.long}


def _run_part(spec: Mapping[str, Any]) -> None:
    gpus = gpu_uuids()
    stage("Ray starts")
    start_ray(len(gpus))
    try:
        if spec["kind"] == "bare":
            for row in bare_rates(gpus[: spec["world"]], 1024, spec["rounds"]):
                emit({"table": "one bucket", **row})
            return
        fleet = _fleet(spec, gpus)
        for setting in itertools.product(spec["bucket_mib"], spec["slots"], spec["mode"]):
            emit(_case(spec, fleet, *setting))
        fleet.close()
    finally:
        ray.shutdown()


def _fleet(spec: Mapping[str, Any], gpus: Sequence[str]) -> Fleet:
    model, (trainer_gpus, engine_gpus) = _model(spec), _placements(spec, gpus)
    stage(f"{len(model)} tensors are made")
    fleet = start_fleet(model, trainer_gpus, engine_gpus, spec["source"])
    fleet.used()
    stage("and filled")
    version = new_version()
    fleet.prepare(version)  # load the checks' kernels first, so that they do not count as our memory
    stage("and compared")
    fleet.wrong(version)
    return fleet


def _model(spec: Mapping[str, Any]) -> Model:
    return model_of(spec["model"], spec["gib"], spec["layers"])


def _placements(spec: Mapping[str, Any], gpus: Sequence[str]) -> tuple[_Slots, _Slots]:
    """Return where trainers are, and where the engine's ranks are."""
    slots: _Slots = [None] * spec["world"] if spec["cpu"] else list(gpus[: spec["world"]])
    if len(slots) < spec["world"]:
        raise SystemExit(f"{spec['world']} GPUs asked for, {len(slots)} there")
    half = len(slots) // 2 if spec["placement"] == "disaggregated" else 0
    return slots[: half or None], slots[half:]


def _case(
    spec: Mapping[str, Any], fleet: Fleet, bucket_mib: int, num_slots: int, mode: Mode
) -> dict[str, object]:
    row: dict[str, object] = {
        "table": {"matrix": "update_weights", "empty": "control", "long": "many updates"}[spec["kind"]],
        "model": spec["model"],
        "source": spec["source"],
        "placement": spec["placement"],
        "world": spec["world"],
        "bucket MiB": bucket_mib,
        "slots": num_slots,
        "mode": mode,
    }
    try:
        settings = config(bucket_mib, num_slots, mode, 2 if spec["join"] else 1)
        return row | _measure(spec, fleet, settings)
    except (WrongWeightsError, WeightSyncError) as error:
        return row | {"failed": f"{type(error).__name__}: {error}"}


def _measure(spec: Mapping[str, Any], fleet: Fleet, settings: SyncConfig) -> dict[str, object]:
    before = fleet.used()
    rounds: list[Round] = []
    extra: dict[str, object] = {}
    with WeightSync(settings) as sync:
        sync.register_trainers(fleet.trainers)
        sync.register_engines({"engine": fleet.front})
        stage("holders start")
        time.sleep(spec["head_start"])
        started = time.perf_counter()
        connect(sync)
        extra |= {"head start s": spec["head_start"], "connect s": time.perf_counter() - started}
        for each in timed_rounds(sync, fleet, spec["rounds"]):
            rounds.append(each)
            number = each.number
            if number == 1 or number == spec["rounds"] or (spec["kind"] == "long" and number in _LONG_MARKS):
                extra[f"extra MiB @{number}" if spec["kind"] == "long" else "extra MiB"] = _extra(
                    fleet, before
                )
        if not spec["cpu"]:
            extra |= floor(sync.links(), rounds)
        if spec["join"]:
            extra["join s"] = _join(sync, fleet, spec)
        stage("leaving")
    return update_row(rounds) | extra


def _join(sync: WeightSync, fleet: Fleet, spec: Mapping[str, Any]) -> float:
    """Kill the engine and add another. Returns the seconds until it serves the version, verified."""
    sync.settle(60)  # holders have copied the version
    stage("the engine is killed")
    fleet.kill_engine()
    deadline = time.monotonic() + 60
    while sync.engine_states()["engine"] is not EngineState.DEAD:
        if time.monotonic() > deadline:
            raise DeadlineError("noticing its end", ("engine",), 60)
        time.sleep(0.1)
    sync.settle(60)  # holders have released the engine's memory
    stage("another engine starts")
    joining = start_engine(_model(spec), (), _placements(spec, gpu_uuids())[1])
    joining.wrong(sync.version)  # the engine's processes have started, and have loaded the checks' kernels
    ray.get([rank.poison.remote() for rank in joining.ranks])
    stage("another engine joins")
    started = time.perf_counter()
    report = sync.add_engine("engine", joining.front)
    seconds = time.perf_counter() - started
    if report is None or not report.verified:
        raise WrongWeightsError(f"the engine that joined was not filled: {report}")
    check(joining.wrong(sync.version), "the engine that joined", sync.version)
    joining.kill_engine()
    return seconds


def _extra(fleet: Fleet, before: Mapping[str, int]) -> int:
    return max(used - before[gpu] for gpu, used in fleet.used().items()) >> 20


def shown(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row without columns that only the file has."""
    return {key: value for key, value in row.items() if key != "table" and not isinstance(value, list | dict)}


if __name__ == "__main__":
    main()
