"""Compares other systems for weight updates with ours, on the same tensors and GPUs.

    python -m benchmarks.bench_peers --only checkpoint_engine [--world 4] [--gib 16]     all GPUs
    python -m benchmarks.bench_peers --only vllm [--bucket-mib 256]                      two GPUs
    python -m benchmarks.bench_peers --only awex [--ranks 1:1] [--moe-layers 4]          as many GPUs as ranks

The peer and ours run one after the other in separate processes, ``--turns`` times. A peer is started as in
the peer's own examples. Before an update the source gets new values and the destination is filled with 0xFF;
afterwards every element is compared. For all systems, this preparation and comparison, connecting, NCCL
set-up and the allocation of reused pinned or shared memory are not timed. Rows have the number of the turn.
Quote a peer's best turn.

``ours`` is always `update_weights` on the driver's wall clock, with Ray's calls, digests of both sides and
their comparison. ``applied`` is the phases pause + move + verify: from published to live and proven.

``checkpoint_engine``: a source sharded over all GPUs to an engine of as many ranks on the same GPUs.
  checkpoint-engine   torchrun, a server and a consumer process on each GPU. ``register`` (copy into pinned
                      memory) + ``gather`` + ``update`` (buckets, copies by the consumers, tear-down), until
                      the slowest rank is done. Nothing is verified. The best bucket size of five, found
                      first. Tensors are whole on their owners: gathering is not counted.
``awex``: the first layers and the embeddings of Qwen3-30B-A3B, from trainer GPUs to the GPUs of one
 engine; ``--ranks 3:1`` is 3 trainer ranks to 1 engine rank, whose shards are uneven.
  awex                torchrun. Building send and receive operations (``build``, the slowest rank) and
                      running them over NCCL until every rank has synchronised (``run``), as awex does in
                      every update. Nothing is verified. The plan is made once (``plan ms``), and the process
                      group is reused.
``vllm``: Qwen3-8B, the whole model on one trainer GPU, to a real vLLM of one rank with dummy weights;
 ``ipc`` on the trainer's own GPU, the other ways on another GPU.
  nccl, ipc, nccl_m2n, sharded_rdt
                      a trainer actor and an actor with a ``vllm.LLM``, joined by vLLM's own trainer side:
                      ``send_weights``, packed or not, on the driver's wall clock
  tensor by tensor    one call and one NCCL broadcast for each parameter, vLLM's loader, as in OpenRLHF

Every part has a time limit. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from benchmarks.cluster import free_port, gpu_uuids, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.gpu_fleet import start_fleet
from benchmarks.isolate import asked, emit, run_part, stage
from benchmarks.models import model_of, save_config, shape_of
from benchmarks.peer_awex import uneven
from benchmarks.peer_vllm import BACKENDS, OwnVllm, VllmTrainer, VllmUnderTest
from benchmarks.updates import (
    MODES,
    NUM_WARM,
    applied,
    check,
    config,
    connect,
    floor,
    new_version,
    spread,
    timed_rounds,
    update_row,
)
from weightsync import SyncReport, WeightSync

__all__ = ["main"]

_PEERS = ("checkpoint_engine", "awex", "vllm")

_OURS = "benchmarks.bench_peers"

Way = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Part:
    """One system alone on the host: the module to start, and the first columns of rows."""

    row: Mapping[str, object]
    spec: Mapping[str, Any]
    module: str = _OURS
    num_ranks: int = field(default=0, kw_only=True)


def main() -> None:
    """Parse arguments, measure part by part, print and write the result."""
    args = _parser().parse_args()
    where = environment()
    rows: list[dict[str, object]] = []
    notes: list[str] = []
    comparisons = list(_comparisons(args, len(gpu_uuids()), notes))
    for parts, turn in itertools.product(comparisons, range(1, args.turns + 1)):
        for part in parts:
            found, trouble = run_part(part.module, part.spec, args.part_timeout, part.num_ranks)
            notes += [trouble] if trouble else []
            rows += [{**part.row, "turn": turn, **row} for row in found]
            for row in rows[len(rows) - len(found) :]:
                print(_shown(row), flush=True)
            if args.json:  # write after each part, as a later one may be cut off
                write_json(args.json, "peers", rows, where, notes)
    for table in dict.fromkeys(str(row["table"]) for row in rows):
        print_table(table, [_shown(row) for row in rows if row["table"] == table], where)
    print("\n".join(notes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--backend", nargs="+", default=["nccl", "ipc"], choices=BACKENDS)
    parser.add_argument("--graphs", action="store_true", help="vLLM captures CUDA graphs: a slower start")
    parser.add_argument("--bucket-mib", type=int, default=256, help="ours")
    parser.add_argument("--mode", default="auto", choices=MODES, help="ours")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=2, help="how often each runs alone")
    parser.add_argument("--part-timeout", type=float, default=240, help="seconds for each system's run")
    parser.add_argument("--json", type=Path)
    return parser


def _ranks(text: str) -> tuple[int, int]:
    trainers, engines = map(int, text.split(":"))
    return trainers, engines


def _comparisons(args: argparse.Namespace, num_gpus: int, notes: list[str]) -> Iterator[list[Part]]:
    """Yield comparisons: the peer's part, then ours."""
    common = {"rounds": args.rounds, "bucket_mib": args.bucket_mib, "mode": args.mode, "cpu": args.cpu}
    for peer in args.only:
        if importlib.util.find_spec(peer) is None:
            notes.append(f"{peer}: not installed, left out")
        elif num_gpus < (1 if peer == "vllm" else 2) and not (args.cpu and peer == "awex"):
            notes.append(f"{peer}: not enough GPUs here, left out")
        elif peer == "checkpoint_engine":
            yield from _checkpoint_engine_parts(args, num_gpus, common)
        elif peer == "awex":
            yield from _awex_parts(args, num_gpus, common)
        else:
            yield from _vllm_parts(args, num_gpus, common, notes)


def _checkpoint_engine_parts(
    args: argparse.Namespace, num_gpus: int, common: dict[str, Any]
) -> Iterator[list[Part]]:
    world = args.world or num_gpus
    for source in args.source:
        row: dict[str, object] = {"table": "checkpoint-engine", "source": source, "world": world}
        theirs = {"source": source, "gib": args.gib, "rounds": args.rounds}
        ours = {"model": ["llama", args.gib, None], "trainers": world, "engines": world, "shared": True}
        yield [
            Part(
                row | {"system": "checkpoint-engine"},
                theirs,
                "benchmarks.peer_checkpoint_engine",
                num_ranks=world,
            ),
            Part(row | {"system": "ours"}, common | ours | {"source": source}),
        ]


def _awex_parts(args: argparse.Namespace, num_gpus: int, common: dict[str, Any]) -> Iterator[list[Part]]:
    half = max(1, num_gpus // 2)
    for trainers, engines in args.ranks or [(half, half), *([(3, 1)] if num_gpus == 4 else [])]:
        named = ["tiny" if args.cpu else "moe", 0, args.moe_layers]
        shards = "uneven" if uneven(model_of(*named), trainers, engines) else "even"
        row: dict[str, object] = {"table": "awex", "ranks": f"{trainers}:{engines}", "shards": shards}
        cut = {"trainers": trainers, "engines": engines}
        theirs = cut | {"layers": args.moe_layers, "cpu": args.cpu, "rounds": args.rounds}
        ours = cut | {"model": named, "source": "device", "shared": False}
        yield [
            Part(row | {"system": "awex"}, theirs, "benchmarks.peer_awex", num_ranks=trainers + engines),
            Part(row | {"system": "ours"}, common | ours),
        ]


def _vllm_parts(
    args: argparse.Namespace, num_gpus: int, common: dict[str, Any], notes: list[str]
) -> Iterator[list[Part]]:
    by_placement: dict[str, list[str]] = {}
    for backend in args.backend:
        if backend != "ipc" and num_gpus < 2:
            notes.append(f"vllm {backend}: needs two GPUs, left out")
            continue
        placement = "same GPU" if backend == "ipc" else "one GPU to another"
        by_placement.setdefault(placement, []).append(backend)
    for placement, backends in by_placement.items():
        row = {"table": "vLLM", "placement": placement}
        specs = [
            common | {"backend": backend, "layers": args.layers, "graphs": args.graphs}
            for backend in backends
        ]
        theirs = [Part(row, spec | {"vllm": "theirs"}) for spec in specs]
        yield [*theirs, Part(row, specs[0] | {"vllm": "ours"})]


def _run_part(spec: Mapping[str, Any]) -> None:
    gpus = gpu_uuids()
    stage("Ray starts")
    start_ray(len(gpus))
    try:
        if "vllm" in spec:
            _vllm(spec, gpus)
        else:
            _ours(spec, gpus)
    finally:
        ray.shutdown()


def _ours(spec: Mapping[str, Any], gpus: list[str]) -> None:
    """Run our fleet with the peer's tensors and cuts, on the same GPUs."""
    placements: list[str | None] = [None] * (spec["trainers"] + spec["engines"]) if spec["cpu"] else [*gpus]
    first = 0 if spec["shared"] else spec["trainers"]
    at = placements[: spec["trainers"]], placements[first : first + spec["engines"]]
    fleet = start_fleet(model_of(*spec["model"]), *at, spec["source"])
    with WeightSync(config(spec["bucket_mib"], 2, spec["mode"])) as sync:
        sync.register_trainers(fleet.trainers)
        sync.register_engines({"engine": fleet.front})
        connect(sync)
        rounds = list(timed_rounds(sync, fleet, spec["rounds"]))
        least = {} if spec["cpu"] else floor(sync.links(), rounds)
        emit({"mode": spec["mode"]} | update_row(rounds) | least)
    fleet.close()


def _vllm(spec: Mapping[str, Any], gpus: list[str]) -> None:
    model = model_of("8b", 0, spec["layers"])
    pair = (gpus[-1], gpus[-1]) if spec["backend"] == "ipc" else gpus[:2]
    if spec["vllm"] == "theirs" and spec["backend"] == "sharded_rdt":
        pair = gpus[1], gpus[0]  # vLLM asks for Ray's executor here, and Ray chooses the first GPU
    options: dict[str, Any] = {
        "gpu_memory_utilization": 0.4,
        "max_model_len": 1024,
        "enforce_eager": not spec["graphs"],
    }
    with tempfile.TemporaryDirectory() as directory:
        save_config(shape_of("8b", spec["layers"]), Path(directory))
        env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        trainer = spawn(
            VllmTrainer, model, 0, 1, f"{directory}/meeting", "device", None, gpu=pair[0], env=env
        )
        if spec["vllm"] == "theirs":
            options |= {"weight_transfer_config": {"backend": spec["backend"]}}
            if spec["backend"] == "sharded_rdt":
                options |= {"distributed_executor_backend": "ray"}
                # Without the address, vLLM's engine core starts a cluster of its own.
                env |= {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
            engine = spawn(OwnVllm, directory, model, options, gpu=pair[1], env=env)
            stage("vLLM and the trainer start")
            ray.get([engine.synchronize.remote(), trainer.used.remote()])
            seconds, _ = _rounds(_theirs(spec["backend"], trainer, engine), trainer, engine, spec["rounds"])
            rows = {name: spread("total", taken) for name, taken in seconds.items()}
        else:
            engine = spawn(VllmUnderTest, directory, model, options, gpu=pair[1], env=env)
            rows = _vllm_ours(spec, trainer, engine)
        for name, row in rows.items():
            emit({"system": name, "GB": sum(tensor.nbytes for tensor in model) / 1e9} | row)


def _vllm_ours(spec: Mapping[str, Any], trainer: Any, engine: Any) -> dict[str, dict[str, object]]:  # noqa: ANN401
    ray.get([engine.info.remote(), trainer.used.remote()])  # wait until they have started
    with WeightSync(config(spec["bucket_mib"], 2, spec["mode"])) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"vllm": engine})
        connect(sync)
        ways: dict[str, Way] = {"ours": lambda: sync.update_weights(sync.version + 1)}
        seconds, reports = _rounds(ways, trainer, engine, spec["rounds"])
    return {"ours": spread("total", seconds["ours"]) | applied(reports)}


def _theirs(backend: str, trainer: Any, engine: Any) -> dict[str, Way]:  # noqa: ANN401 (actor handles)
    """Return vLLM's ways by `backend`. A way connects in the first round, which is not timed."""

    def way(**settings: object) -> Way:
        opened = functools.cache(lambda: ray.get(trainer.open.remote(engine, backend, settings)))
        return lambda: (opened(), ray.get(trainer.send.remote()))

    def each() -> None:
        ray.get(trainer.send_each.remote(engine))
        ray.get(engine.synchronize.remote())

    if backend == "sharded_rdt":
        return {"vLLM sharded_rdt": way(num_consumers=1, trainer_actor_namespace="bench")}
    if backend == "ipc":
        # vLLM's default of 1 GiB refuses the embedding, which is larger.
        return {
            "vLLM ipc packed": way(packed=True, packed_buffer_size_bytes=2 << 30),
            "vLLM ipc": way(packed=False),
        }
    meeting = {"master_address": "127.0.0.1", "world_size": 2}
    if backend == "nccl_m2n":
        return {"vLLM nccl_m2n": way(master_port=free_port(), **meeting)}
    return {
        "vLLM nccl packed": way(master_port=free_port(), packed=True, **meeting),
        "vLLM nccl": way(master_port=free_port(), packed=False, **meeting),
        "tensor by tensor": each,
    }


def _rounds(
    ways: Mapping[str, Way],
    trainer: Any,  # noqa: ANN401 (an actor handle)
    engine: Any,  # noqa: ANN401 (an actor handle)
    num_rounds: int,
) -> tuple[dict[str, list[float]], list[SyncReport]]:
    """Return seconds of each way after warm-up, and our reports.

    A way that fails is left out.
    """
    reports: list[SyncReport] = []
    seconds: dict[str, list[float]] = {}
    for name, run in ways.items():
        taken = []
        try:
            for number in range(NUM_WARM + num_rounds):
                version = new_version()
                stage(f"{name}: round {number + 1 - NUM_WARM}")
                ray.get([trainer.change.remote(version), engine.poison.remote()])
                started = time.perf_counter()
                report = run()
                taken.append(time.perf_counter() - started)
                reports += [report] if isinstance(report, SyncReport) else []
                check(ray.get(engine.wrong.remote(version)), name, version)
        except Exception as error:  # noqa: BLE001 (the other ways continue)
            print(f"{name}: left out: {type(error).__name__}: {str(error)[-600:]}", flush=True)
            continue
        seconds[name] = taken[NUM_WARM:]
    return seconds, reports[NUM_WARM:]


def _shown(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row without columns that only the file has."""
    return {key: value for key, value in row.items() if key != "table" and not isinstance(value, list | dict)}


if __name__ == "__main__":
    _run_part(asked()) if "--part" in sys.argv else main()
