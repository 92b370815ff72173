"""Times an engine from `kill -9` to serving again, against only starting the engine.

    python -m benchmarks.bench_heal [--megabytes 1000] [--rounds 3] [--refill auto] [--json FILE]

One trainer and two engines (transformers on the CPU, a Qwen3 of that many bytes in float32) on one
host. Each round kills one engine while it idles and waits until it serves again. Clocks, by the driver:

- ``kill to serving``: from Ray's report of the death, within milliseconds, until the refilled engine serves,
  verified.
- ``engine start``: starting only the same actor, before, from the call until the actor answers.
- ``ours``: the difference of both.
- ``refill``: from the start of the new process until it serves: connecting, reading, loading, verifying,
  resuming.

Medians, with minimum and maximum. Digests prove each refill; the sum of all elements is also compared with
the trainer's.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.bench_sync import Trainer, save_config, spawn, start_ray
from benchmarks.common import environment, print_table, write_json
from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.memory.tensors import named_tensors

__all__ = ["main"]


class Engine(EngineActor):
    """An engine that returns its weights."""

    async def checksum(self) -> float:
        engine: Any = self._engine  # the model is private; only this benchmark reads it
        return _checksum(engine.model)

    async def pid(self) -> int:
        return os.getpid()


class Checked(Trainer):
    """A trainer that returns its weights."""

    def checksum(self) -> float:
        return _checksum(self.model)


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--refill", default="auto", choices=["auto", "rdma", "tcp", "zeromq"])
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = environment(("torch", "ray", "numpy", "transformers"))
    start_ray()
    try:
        rows = [_measure(args)]
    finally:
        ray.shutdown()
    print_table("kill -9 of an engine", rows, where)
    if args.json:
        write_json(args.json, "heal", rows, where)


def _measure(args: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        save_config(directory, int(args.megabytes * 1e6))
        engine = partial(spawn, Engine, "torch", directory)
        started = time.monotonic()
        first = engine("e0")
        ray.get(first.info.remote())
        starts, times, refills, rates = [time.monotonic() - started], [], [], []
        trainer = spawn(Checked, directory)
        config = SyncConfig(bucket_bytes=args.bucket_mib << 20, refill=args.refill)
        with WeightSync(config) as sync:
            sync.register_trainers([trainer])
            sync.register_engines({"e0": first, "e1": engine("e1")}, respawn=engine)
            sync.connect()
            sync.update_weights(1)
            sync.settle(60)
            for _ in range(args.rounds):
                _kill(sync, trainer)
                heal = sync.heals[-1]
                assert heal.verified, heal
                assert heal.respawned_at is not None
                assert heal.serving_at is not None
                times.append(heal.serving_at - heal.died_at)
                refills.append(heal.serving_at - heal.respawned_at)
                rates.append(heal.gb_per_s)
                started = time.monotonic()
                extra = engine("extra")
                ray.get(extra.info.remote())
                starts.append(time.monotonic() - started)
                ray.kill(extra)
            nbytes, ways = sync.plan.total_nbytes, set(heal.ways.values())
        ours = [total - statistics.median(starts) for total in times]
        row: dict[str, object] = {"MB": nbytes / 1e6, "way": ", ".join(sorted(ways))}
        for name, seconds in (
            ("kill to serving", times),
            ("engine start", starts),
            ("ours", ours),
            ("refill", refills),
        ):
            row[f"{name} s"] = round(statistics.median(seconds), 2)
            row[f"{name} range"] = f"{min(seconds):.2f}-{max(seconds):.2f}"
        return row | {"refill GB/s": round(statistics.median(rates), 2)}


def _kill(sync: WeightSync, trainer: Any) -> None:  # noqa: ANN401 (an actor handle)
    victim = sync.serving()["e1"]
    num_heals = len(sync.heals)
    os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
    while len(sync.heals) == num_heals:
        time.sleep(0.01)
    healed = sync.serving()["e1"]
    assert ray.get(healed.checksum.remote()) == ray.get(trainer.checksum.remote())


@torch.no_grad()
def _checksum(model: torch.nn.Module) -> float:
    return sum(float(tensor.double().sum()) for tensor in named_tensors(model)[0].values())


if __name__ == "__main__":
    main()
