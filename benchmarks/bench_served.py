"""Times updates of a ``vllm serve`` that Ray did not start, beside vLLM in an actor.

    python -m benchmarks.bench_served --model 8b --rounds 8
    python -m benchmarks.bench_served --cpu --model tiny --rounds 2      on a CPU, as a smoke test

Both have the same options and share the trainer's GPU. The fleets take turns: each connects, and makes some
updates, twice. Every update compares the digests of trainer and engine. Medians with minimum and maximum,
without the first two updates after a connect.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks.cluster import free_port, kill, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from benchmarks.latency_rig import ENGINES_ENV, ON_CPU, on_gpus
from benchmarks.latency_trainer import LatencyTrainer
from benchmarks.models import model_of, save_config, shape_of
from benchmarks.updates import Round, WrongWeightsError, config, new_version, update_row
from weightsync import EngineActor, WeightSync

__all__ = ["main"]

_NUM_TURNS, _NUM_WARM = 2, 2
_TOKEN = "a secret of this benchmark"


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", choices=["1b", "8b", "100m", "tiny"])
    parser.add_argument("--rounds", type=int, default=8, help="after each connect")
    parser.add_argument("--cpu", action="store_true", help="on this host instead of a GPU: a smoke test")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = environment()
    os.environ["WEIGHTSYNC_TOKEN"] = _TOKEN
    start_ray(0 if args.cpu else 1)
    try:
        rounds = _measure(args.model, args.rounds, cpu=args.cpu)
    finally:
        ray.shutdown()
    rows = [{"engine": name, "model": args.model} | update_row(its) for name, its in rounds.items()]
    print_table("vLLM in an actor, and served", rows, where)
    if args.json:
        write_json(args.json, "served", rows, where, [])


def _measure(model: str, num_rounds: int, *, cpu: bool) -> dict[str, list[Round]]:
    port, tensors, gpu = free_port(), model_of(model), None if cpu else "0"
    options = ON_CPU["vllm"] if cpu else on_gpus("vllm", 0.4)
    options.pop("weight_transfer_config", None)
    rounds: dict[str, list[Round]] = {"in an actor": [], "served": []}
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder:
        save_config(shape_of(model), Path(folder))
        slot = "slot-0" if cpu else None
        trainer = spawn(
            *(LatencyTrainer, tensors, 0, 1, f"{folder}/meeting", "device", slot), gpu=gpu, env=ENGINES_ENV
        )
        driver = f"{ray.util.get_node_ip_address()}:{port}"
        with _served(folder, driver, options, gpu) as url:
            actor = spawn(EngineActor, "vllm", folder, "actor", options, gpu=gpu or "", env=ENGINES_ENV)
            fleets: dict[str, ActorHandle[Any] | str] = {"in an actor": actor, "served": url}
            for _ in range(_NUM_TURNS):
                for name, engine in fleets.items():
                    rounds[name] += _turn(trainer, engine, port, num_rounds)
        kill([trainer, actor])
    return rounds


def _turn(trainer: ActorHandle[Any], engine: ActorHandle[Any] | str, port: int, num: int) -> list[Round]:
    found = []
    with WeightSync(replace(config(256, 2), join_port=port, connect_timeout_s=600)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        for _ in range(_NUM_WARM + num):
            ray.get(trainer.change.remote(version := new_version()))
            started = time.perf_counter()
            report = sync.update_weights(version)
            found.append(Round(version, time.perf_counter() - started, report))
            if not report.verified:
                raise WrongWeightsError(str(report))
            sync.settle(60)
    return found[_NUM_WARM:]


@contextlib.contextmanager
def _served(folder: str, driver: str, options: dict[str, Any], gpu: str | None) -> Iterator[str]:
    """Start the server. Yields its URL: it joins once the driver expects it."""
    port = free_port()
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--port", str(port)]
    words += shlex.split("--load-format dummy --skip-tokenizer-init --dtype bfloat16 --middleware")
    words += ["weightsync.JoinDriver", "--worker-extension-cls", "weightsync.WeightSyncWorker"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    joining = {
        "WEIGHTSYNC_JOIN": driver,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    env = os.environ | ENGINES_ENV | joining | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    server = subprocess.Popen(words, env=env, start_new_session=True)
    try:
        yield f"http://{driver.rpartition(':')[0]}:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


if __name__ == "__main__":
    main()
