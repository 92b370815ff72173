"""Times the layers of a real engine's update, by the engine's own calls and ours.

    python -m benchmarks.bench_latency --engine sglang vllm --model 1b 8b --tp 1 2
    python -m benchmarks.bench_latency --engine vllm --quantization config.json    quantised, by ours alone
    python -m benchmarks.bench_latency --online fp8    the engine quantises full precision as it loads
    python -m benchmarks.bench_latency --way direct --apart    from trainers on other GPUs of the host
    python -m benchmarks.bench_latency --way loop --apart --model 100m    as in README's loop
    python -m benchmarks.bench_latency --cpu --model tiny      on a CPU, as a smoke test

One part is an engine with dummy weights, and as many FSDP ranks as the engine has tensor-parallel ranks, on
the same GPUs. All ways update this engine in turns, round after round. Before an update the trainers get new
weights and the engine 0xFF, and afterwards every element is compared. This preparation and comparison are not
timed. Engines that convert weights, such as quantised engines, are not prepared: updates compare digests.

Ways:
  per-tensor              SGLang: ``update_weights_from_tensor``, a CUDA IPC handle for each tensor, all in
                          one call; vLLM 0.24: its IPC transfer, not packed
  per-tensor, one by one  SGLang: the same with a call for each tensor; in fewer rounds
  bucketed                SGLang: ``load_format="flattened_bucket"``, a handle for each `--bucket-mib`;
                          vLLM: its IPC transfer, packed into a buffer of `--bucket-mib`
  direct                  `update_weights`
  loop                    the same with default settings, and a rollout of 16 tokens after each update

Layers of the engine's own ways, with an idle device before and after a layer. A round's layers add up to the
round's total:
  gather    shards to whole tensors on every trainer rank, by NCCL; none with one rank
  pack      SGLang's buckets: tensors into one. vLLM's packing counts as metadata
  metadata  IPC handles and names, serialised, and all ranks' payloads sent to the first rank
  open      in the engine's slowest rank: unpickling, mapping the handles; vLLM packed: copying, too
  load      in the same rank: the model's ``load_weights``, for vLLM with the layerwise reload
  way       the rest of the engine's calls: Ray to the actor, ZMQ or vLLM's queue to the ranks, and back
  session   vLLM: ``start_weight_update`` and ``finish_weight_update``
  cache     dropping cached prefixes
  rest      the rest of the total: the driver's calls, barriers of the trainer's ranks
``empty call`` is the median of 20 calls that do nothing, from trainer to ranks and back. Times ``calls``, it
is about `way`. ``total`` is the driver's wall clock, without verification.

Ours: the phases of the report, by the driver's clock, and ``load`` and ``verify`` of the slowest rank, which
are inside `move`. The digests of both sides and their comparison are part of the total.

vLLM 0.24 does not unmap a packed buffer in the engine's process after an update.
Medians with minimum and maximum, without the first two rounds of each way. Every part is a process with a
time limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.cluster import gpu_uuids, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.isolate import emit, run_part
from benchmarks.latency_engines import ENGINES
from benchmarks.latency_rig import Layers, Rig, start
from benchmarks.updates import PHASES, Round, check, config, new_version, spread, update_row
from weightsync import SyncConfig, SyncReport
from weightsync.plan.layout.formats import FIELD
from weightsync.recipes.forecast.quantised import quantization_config

__all__ = ["main"]

_NUM_WARM = 2
_NUM_PINGS = 20
_WHOLE = 1 << 62  # bytes; everything in one call
_WAYS = ("per-tensor", "bucketed", "direct")
_LOOP = "loop"
_OWN, _OURS = "the engines' own calls", "ours"
_LAYERS = ("gather", "pack", "metadata", "open", "load", "way", "session", "cache", "rest")

_COLUMNS = {
    _OWN: (
        "way",
        "total ms",
        "total range",
        *(f"{layer} ms" for layer in _LAYERS),
        "calls",
        "empty call ms",
        "GB/s",
    ),
    _OURS: (
        *("total ms", "total range", *(f"{phase} ms" for phase in PHASES), "rank load ms", "rank verify ms"),
        *("GB/s", "route"),
    ),
}
"""Columns of each table; the file has more."""

Way = Callable[[], "Layers | Round"]


def main() -> None:
    """Parse arguments, measure part by part, print and write the result."""
    parser = _parser()
    args = parser.parse_args()
    if args.part:
        _run_part(json.loads(args.part))
        return
    if args.apart and args.way not in (["direct"], [_LOOP]):
        parser.error("--apart: the engines' own ways share a GPU with trainers; give --way direct or loop")
    if _LOOP in args.way and args.way != [_LOOP]:
        parser.error("--way loop: its settings are not those of the others; give it alone")
    where = environment()
    rows: list[dict[str, object]] = []
    notes: list[str] = []
    for spec in _parts(args, notes):
        found, trouble = run_part("benchmarks.bench_latency", spec, args.part_timeout)
        rows += found
        notes += [trouble] if trouble else []
        for row in found:
            print(json.dumps(_shown(row)), flush=True)
        if args.json:  # write after each part, as a later one may be cut off
            write_json(args.json, "latency", rows, where, notes)
    for title in dict.fromkeys(str(row["table"]) for row in rows):
        print_table(title, [_shown(row) for row in rows if row["table"] == title], where)
    print("\n".join(notes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), help="sglang and vllm; torch on a CPU")
    parser.add_argument(
        "--model", nargs="+", default=["1b", "8b"], choices=["1b", "8b", "moe4", "100m", "tiny"]
    )
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1], help="ranks of the engine, and of the trainers"
    )
    parser.add_argument("--way", nargs="+", default=list(_WAYS), choices=[*_WAYS, _LOOP])
    parser.add_argument("--apart", action="store_true", help="trainers on other GPUs; only with --way direct")
    parser.add_argument("--bucket-mib", type=int, default=1024, help="of the engines' own buckets")
    parser.add_argument(
        "--gpu-memory", type=float, default=0.5, help="share of a GPU that the engine may take"
    )
    parser.add_argument("--quantization", help="config.json of a quantised model, whose format vLLM then has")
    parser.add_argument("--online", help="the engine's own option quantization, without such a config")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each-rounds", type=int, default=2, help="of one call for each tensor")
    parser.add_argument("--cpu", action="store_true", help="on this host instead of GPUs: a smoke test")
    parser.add_argument("--part-timeout", type=float, default=240, help="seconds for each engine")
    parser.add_argument("--json", type=Path)
    return parser


def _parts(args: argparse.Namespace, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the spec of each process. Adds left out cases to `notes`."""
    engines = args.engine or (["torch"] if args.cpu else ["sglang", "vllm"])
    num_gpus = len(gpu_uuids())
    common = {"way": args.way, "bucket_mib": args.bucket_mib, "gpu_memory": args.gpu_memory, "cpu": args.cpu}
    common |= {"rounds": args.rounds, "each_rounds": args.each_rounds, "apart": args.apart}
    common["quantization"] = {"quantization": args.online} if args.online else {}
    if args.quantization:
        common["quantization"] = {"hf_overrides": {FIELD: quantization_config(args.quantization)}}
    for engine, model, tp in itertools.product(engines, args.model, args.tp):
        if importlib.util.find_spec(engine) is None:
            notes.append(f"{engine}: not installed, left out")
        elif num_gpus < tp * (1 + args.apart) and not args.cpu:
            notes.append(f"{engine} {model}, {tp} ranks: {num_gpus} GPUs here, left out")
        else:
            yield {"engine": engine, "model": model, "tp": tp, **common}


def _run_part(spec: Mapping[str, Any]) -> None:
    start_ray(0 if spec["cpu"] else spec["tp"] * (1 + spec["apart"]))
    try:
        where = spec["engine"], spec["model"], spec["tp"], spec["gpu_memory"], spec["quantization"]
        settings = SyncConfig(timeout_s=60) if spec["way"] == [_LOOP] else config(256, 2)
        with start(*where, cpu=spec["cpu"], apart=spec["apart"], config=settings) as rig:
            named = {key: spec[key] for key in ("engine", "model", "tp", "apart")}
            pings = ray.get(rig.trainers[0].ping.remote(rig.engine, _NUM_PINGS))
            ways = _ways(rig, spec)
            if not rig.has_own_way:
                print(
                    f"{rig.kind}: its own calls are left out: none here, or its weights cannot be seen",
                    flush=True,
                )
            few = {name: spec["each_rounds"] for name in ways if name.endswith("one by one")}
            found, failed = _take_turns(rig, ways, spec["rounds"], few)
            for name, rounds in found.items():
                emit(named | {"way": name} | _row(rounds, statistics.median(pings), rig.nbytes))
    finally:
        ray.shutdown()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _ways(rig: Rig, spec: Mapping[str, Any]) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    if rig.has_own_way and {"per-tensor", "bucketed"} & set(spec["way"]):
        rig.load_code()
    if "per-tensor" in spec["way"] and rig.has_own_way:
        ways["per-tensor"] = lambda: rig.own(_WHOLE, flat=False)
        if rig.kind == "sglang":
            ways["per-tensor, one by one"] = lambda: rig.own(1, flat=False)
    if "bucketed" in spec["way"] and rig.has_own_way:
        ways["bucketed"] = lambda: rig.own(spec["bucket_mib"] << 20, flat=True)
    if "direct" in spec["way"]:
        rig.connect()
        ways["direct"] = rig.ours
    if _LOOP in spec["way"]:
        rig.connect()
        ways[_LOOP] = rig.loop
    return ways


def _take_turns(
    rig: Rig, ways: Mapping[str, Way], num_rounds: int, few: Mapping[str, int]
) -> tuple[dict[str, list[Layers | Round]], list[str]]:
    """Run the ways in turns.

    Returns times after warm-up and failures; ways in `few` get fewer rounds.
    """
    found: dict[str, list[Layers | Round]] = {name: [] for name in ways}
    failed: list[str] = []
    for number in range(_NUM_WARM + num_rounds):
        for name, update in ways.items():
            if name in failed or number >= _NUM_WARM + few.get(name, num_rounds):
                continue
            version = new_version()
            rig.prepare(version)
            try:
                found[name].append(update())
                check(rig.wrong(version), name, version)
            except Exception as error:  # noqa: BLE001 (the other ways continue)
                print(f"{name}: given up: {type(error).__name__}: {str(error)[-600:]}", flush=True)
                failed.append(name)
    return {name: rounds[_NUM_WARM:] for name, rounds in found.items() if name not in failed}, failed


def _row(rounds: Sequence[Layers | Round], ping: float, nbytes: int) -> dict[str, object]:
    ours = [each for each in rounds if isinstance(each, Round)]
    if ours:
        reports = [each.report for each in ours]
        row = {"table": _OURS} | update_row(ours)
        return row | _slowest("load", reports) | _slowest("verify", reports)
    layers = [each for each in rounds if not isinstance(each, Round)]
    row = {"table": _OWN} | spread("total", [each["total"] for each in layers])
    for name in _LAYERS:
        if any(name in each for each in layers):
            row[f"{name} ms"] = statistics.median(each.get(name, 0.0) for each in layers) * 1e3
    total = statistics.median(each["total"] for each in layers)
    row |= {"calls": layers[0]["calls"], "empty call ms": ping * 1e3}
    return row | {"GB": nbytes / 1e9, "GB/s": nbytes / total / 1e9}


def _slowest(what: str, reports: Sequence[SyncReport]) -> dict[str, object]:
    """Return the slowest engine rank's time for `what` in each update."""
    ranks = [rank for rank in reports[0].spans if rank.startswith("engine ")]
    seconds = [
        max(sum(span.seconds for span in report.spans[rank] if span.name == what) for rank in ranks)
        for report in reports
    ]
    return {f"rank {what} ms": statistics.median(seconds) * 1e3}


def _shown(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row's columns for the table."""
    shown = {"engine": f"{row['engine']} {row['model']} tp {row['tp']}"}
    return shown | {name: row.get(name, "") for name in _COLUMNS[str(row["table"])]}


if __name__ == "__main__":
    main()
