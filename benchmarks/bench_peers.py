"""Other ways to bring a trainer's weights into an engine, on the same tensors and GPUs, in the same run.

    python -m benchmarks.bench_peers --only checkpoint_engine [--world 4] [--gib 16]     all GPUs
    python -m benchmarks.bench_peers --only vllm [--bucket-mib 256]                      two GPUs
    python -m benchmarks.bench_peers --only awex [--ranks 1:1] [--moe-layers 4]          as many GPUs as ranks

Both fleets of a comparison live at the same time and take turns, one update each, round after round.
Before each update the source holds other values and the destination is filled with 0xFF; after it
every element is compared. Both are outside the clock. Every clock is the driver's wall clock from
the first call until the last process has answered, Ray's calls included; connecting, NCCL set-up and
pinned or shared memory that is used again are outside, for all.

``checkpoint_engine``: a source sharded over all GPUs to an engine of as many ranks on the same GPUs.
  ours                `update_weights`: digests on both sides and their comparison included; ``applied``
                      is its phases pause + move + verify: from published to applied and proven
  checkpoint-engine   ``register`` (copy into pinned memory) + ``gather`` + ``update`` (buckets, copies
                      by the consumers, tear-down); nothing is verified. Its best bucket size of five,
                      found first. Its tensors are whole on their owners: gathering is not counted.
``awex``: the first layers and the embeddings of Qwen3-30B-A3B, from trainer GPUs to the GPUs of one
 engine; ``--ranks 3:1`` is 3 trainer ranks to 1 engine rank, whose shards are uneven.
  ours                as above
  awex                building its send and receive operations (``build``, the slowest rank) and running them
                      over NCCL until every rank has synchronised (``run``), as it does each time; nothing is
                      verified. Its plan is made once (``plan ms``); its process group stays.
``vllm``: Qwen3-8B, the whole model on one trainer GPU, to a real vLLM of one rank with dummy weights;
 ``nccl`` on another GPU and ``ipc`` on the trainer's own.
  ours                as above
  nccl, ipc           ``start_weight_update`` + sending + ``finish_weight_update``, packed or not
  tensor by tensor    one call and one NCCL broadcast for each parameter, vLLM's loader, as in OpenRLHF

Every comparison is a process with a time limit of its own; a peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.cluster import free_port, gpu_uuids, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.gpu_fleet import start_fleet
from benchmarks.isolate import emit, run_part, stage
from benchmarks.models import model_of, save_config, shape_of
from benchmarks.peer_awex import compare_awex
from benchmarks.peer_checkpoint_engine import start_checkpoint_engine
from benchmarks.peer_vllm import VllmTrainer, VllmUnderTest
from benchmarks.turns import NUM_WARM, connected, in_turns, setting
from benchmarks.updates import (
    MODES,
    applied,
    check,
    config,
    connect,
    new_version,
    spread,
    timed_rounds,
    update_row,
)
from weightsync import SyncReport, WeightSync
from weightsync.errors import WeightSyncError

__all__ = ["main"]

_PEERS = ("checkpoint_engine", "awex", "vllm")

Way = Callable[[], object]


def main() -> None:
    """Parse, measure part by part, print, write."""
    args = _parser().parse_args()
    if args.part:
        _run_part(json.loads(args.part))
        return
    num_gpus = len(gpu_uuids())
    where = environment()
    rows: list[dict[str, object]] = []
    notes: list[str] = []
    for spec in _parts(args, num_gpus, notes):
        found, trouble = run_part("benchmarks.bench_peers", spec, args.part_timeout)
        rows += found
        notes += [trouble] if trouble else []
        for row in found:
            print(json.dumps(_shown(row)), flush=True)
        if args.json:  # after each part: a later one may be cut off
            write_json(args.json, "peers", rows, where, notes)
    tables = list(dict.fromkeys(str(row["table"]) for row in rows))
    for title in tables:
        print_table(title, [_shown(row) for row in rows if row["table"] == title], where)
    print("\n".join(notes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=_PEERS, default=_PEERS)
    parser.add_argument("--world", type=int, help="GPUs of the checkpoint-engine comparison (all)")
    parser.add_argument("--source", nargs="+", default=["device", "host"], choices=["device", "host"])
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--layers", type=int, default=36, help="of Qwen3-8B, in the vLLM comparison")
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=_ranks,
        help="awex: trainers:engine ranks (half of the GPUs each; of 4 also 3:1)",
    )
    parser.add_argument("--moe-layers", type=int, default=4, help="of Qwen3-30B-A3B, in awex's comparison")
    parser.add_argument("--cpu", action="store_true", help="awex over gloo, a tiny model: a smoke test")
    parser.add_argument("--backend", nargs="+", default=["nccl", "ipc"], choices=["nccl", "ipc"])
    parser.add_argument("--graphs", action="store_true", help="vLLM captures CUDA graphs: a slower start")
    parser.add_argument("--bucket-mib", type=int, default=256, help="ours")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[2], help="ours; more than one: after another"
    )
    parser.add_argument("--mode", nargs="+", default=["auto"], choices=MODES, help="ours, likewise")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part-timeout", type=float, default=240, help="seconds for each comparison")
    parser.add_argument("--json", type=Path)
    return parser


def _parts(args: argparse.Namespace, num_gpus: int, notes: list[str]) -> Iterator[dict[str, Any]]:
    common = {"rounds": args.rounds, "bucket_mib": args.bucket_mib}
    common |= {"settings": [*itertools.product(args.mode, args.slots)]}
    for peer in args.only:
        if importlib.util.find_spec(peer) is None:
            notes.append(f"{peer}: not installed, left out")
        elif peer == "awex" and (num_gpus > 1 or args.cpu):
            half = max(1, num_gpus // 2)
            for trainers, engines in args.ranks or [(half, half), *([(3, 1)] if num_gpus == 4 else [])]:
                shape = {"trainers": trainers, "engines": engines, "cpu": args.cpu, "layers": args.moe_layers}
                yield {"peer": peer, **shape, **common}
        elif num_gpus == 0 or peer == "awex":
            notes.append(f"{peer}: not enough GPUs here, left out")
        elif peer == "checkpoint_engine":
            for source in args.source:
                world = args.world or num_gpus
                yield {"peer": peer, "source": source, "world": world, "gib": args.gib, **common}
        else:
            for backend in args.backend:
                if backend == "nccl" and num_gpus < 2:
                    notes.append("vllm nccl: needs two GPUs, left out")
                    continue
                yield {
                    "peer": peer,
                    "backend": backend,
                    "layers": args.layers,
                    "graphs": args.graphs,
                    **common,
                }


def _ranks(text: str) -> tuple[int, int]:
    trainers, engines = map(int, text.split(":"))
    return trainers, engines


def _run_part(spec: Mapping[str, Any]) -> None:
    gpus = gpu_uuids()
    stage("Ray starts")
    start_ray(len(gpus))
    try:
        compare = {"checkpoint_engine": _checkpoint_engine, "awex": compare_awex, "vllm": _vllm}
        compare[spec["peer"]](spec, gpus)
    finally:
        ray.shutdown()


def _checkpoint_engine(spec: Mapping[str, Any], gpus: Sequence[str]) -> None:
    model, used = model_of("llama", spec["gib"]), gpus[: spec["world"]]
    row = {"table": "checkpoint-engine", "source": spec["source"], "world": len(used)}
    fleet = start_fleet(model, used, used, spec["source"])
    peer = start_checkpoint_engine(model, used, spec["source"])
    peer.prepare(new_version())
    sizes = peer.sweep()
    best = min(sizes, key=lambda size: sizes[size])
    peer.limit(best)
    ours_named = {"system": "ours", "bucket": f"{spec['bucket_mib']} MiB"}
    ours, theirs = in_turns(fleet, peer, spec)
    if ours:
        emit(row | ours_named | ours)
    total = spread("total", [sum(phases.values()) for phases in theirs])
    phases = [spread(name, [taken[name] for taken in theirs]) for name in ("register", "gather", "update")]
    nbytes = sum(tensor.nbytes for tensor in model)
    rate = nbytes / float(str(total["total ms"])) / 1e6
    merged = {key: value for part in (total, *phases) for key, value in part.items()}
    named = {"system": "checkpoint-engine", "bucket": f"{best:g} GB", "GB": nbytes / 1e9, "GB/s": rate}
    emit(row | named | merged | {"sweep s": {str(size): seconds for size, seconds in sizes.items()}})
    peer.close()
    for each in spec["settings"][1:]:
        with connected(fleet, spec["bucket_mib"], *each) as sync:
            again = list(timed_rounds(sync, fleet, spec["rounds"], NUM_WARM))
        emit(row | ours_named | setting(*each) | update_row(again))


def _vllm(spec: Mapping[str, Any], gpus: Sequence[str]) -> None:
    backend = spec["backend"]
    model = model_of("8b", 0, spec["layers"])
    with tempfile.TemporaryDirectory() as directory:
        save_config(shape_of("8b", spec["layers"]), Path(directory))
        options = {
            "gpu_memory_utilization": 0.4,
            "max_model_len": 1024,
            "enforce_eager": not spec["graphs"],
            "weight_transfer_config": {"backend": backend},
        }
        meeting = f"{directory}/meeting"
        env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        pair = gpus[:2] if backend == "nccl" else (gpus[-1], gpus[-1])
        trainer = spawn(VllmTrainer, model, 0, 1, meeting, "device", None, gpu=pair[0], env=env)
        engine = spawn(VllmUnderTest, directory, model, options, gpu=pair[1], env=env)
        ray.get([engine.info.remote(), trainer.used.remote()])  # started
        mode, slots = spec["settings"][0]
        with WeightSync(config(spec["bucket_mib"], slots, mode)) as sync:
            sync.register_trainers([trainer])
            sync.register_engines({"vllm": engine})
            ways = _ours(sync) | _theirs(backend, trainer, engine)
            seconds, reports = _take_turns(ways, trainer, engine, spec["rounds"])
    nbytes = sum(tensor.nbytes for tensor in model)
    for name, taken in seconds.items():
        row = spread("total", taken)
        rate = nbytes / float(str(row["total ms"])) / 1e6
        placement = "one GPU to another" if backend == "nccl" else "same GPU"
        row |= {"GB": nbytes / 1e9, "GB/s": rate}
        shown = applied(reports) if name == "ours" else {"applied ms": row["total ms"]}
        emit({"table": "vLLM", "placement": placement, "system": name, **row, **shown})


def _theirs(backend: str, trainer: Any, engine: Any) -> dict[str, Way]:  # noqa: ANN401 (actor handles)
    def nccl(packed: bool) -> None:
        ray.get([engine.take_nccl.remote(packed), trainer.send_nccl.remote(packed)])

    def ipc(packed: bool) -> None:
        ray.get(engine.start.remote())
        ray.get(trainer.send_ipc.remote(engine, packed))
        ray.get(engine.finish.remote())

    def each() -> None:
        ray.get(trainer.send_each.remote(engine))
        ray.get(engine.synchronize.remote())

    if backend == "ipc":
        return {"vLLM ipc packed": lambda: ipc(True), "vLLM ipc": lambda: ipc(False)}
    port = free_port()
    ray.get([engine.join.remote(port), trainer.join.remote(port)])
    named: dict[str, Way] = {"vLLM nccl packed": lambda: nccl(True), "vLLM nccl": lambda: nccl(False)}
    return named | {"tensor by tensor": each}


def _ours(sync: WeightSync) -> dict[str, Way]:
    try:
        connect(sync)
    except WeightSyncError as error:
        print(f"ours: left out: {type(error).__name__}: {error}", flush=True)
        return {}
    return {"ours": lambda: sync.update_weights(sync.version + 1)}


def _take_turns(
    ways: Mapping[str, Way],
    trainer: Any,  # noqa: ANN401 (an actor handle)
    engine: Any,  # noqa: ANN401 (an actor handle)
    num_rounds: int,
) -> tuple[dict[str, list[float]], list[SyncReport]]:
    """Seconds of each way in each round after the warm ones, and our reports; who fails is left out."""
    reports: list[SyncReport] = []
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed: set[str] = set()
    for _ in range(NUM_WARM + num_rounds):
        for name, run in ways.items():
            if name in failed:
                continue
            version = new_version()
            ray.get([trainer.change.remote(version), engine.poison.remote()])
            try:
                started = time.perf_counter()
                report = run()
                seconds[name].append(time.perf_counter() - started)
                reports += [report] if isinstance(report, SyncReport) else []
                check(ray.get(engine.wrong.remote(version)), name, version)
            except Exception as error:  # noqa: BLE001 (the other ways go on)
                print(f"{name}: left out: {type(error).__name__}: {str(error)[-600:]}", flush=True)
                failed.add(name)
    kept = {name: taken[NUM_WARM:] for name, taken in seconds.items() if name not in failed}
    return kept, reports[NUM_WARM:]


def _shown(row: Mapping[str, object]) -> dict[str, object]:
    """A row without what only the file keeps."""
    return {key: value for key, value in row.items() if key != "table" and not isinstance(value, list | dict)}


if __name__ == "__main__":
    main()
