"""One update on the CPU against a bare broadcast and one copy per engine.

    python -m benchmarks.bench_sync [--megabytes 1 400] [--engines 2] [--rounds 9] [--json FILE]
    python -m benchmarks.bench_sync --gpu --help        on GPUs instead: see `benchmarks.bench_gpu`

For every size a transformers Qwen3 of that many bytes (float32) is updated from one trainer to the
engines, which are processes with separate holders. In the same run, interleaved round by round, as many
processes as holders run

- ``broadcast``: one `torch.distributed.broadcast` (gloo) of the same bytes in one tensor, and
- ``copy``: one `Tensor.copy_` of the same bytes in every receiving process, all at once.

Clocks: ``update`` is the wall clock of `update_weights`, with digests on both sides and the
comparison; ``broadcast`` and ``copy`` run from a barrier to the last process's return. ``ratio`` is
update / (broadcast + copy); ``overhead`` is the difference of both. Medians, with minimum and maximum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.actor import ActorHandle

from benchmarks import bench_gpu
from benchmarks.common import environment, print_table, write_json
from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard

__all__ = ["Trainer", "main", "save_config", "spawn", "start_ray"]

_HIDDEN, _LAYERS = 512, 4


class Trainer(TrainerShard):
    """A trainer with a whole model that changes on demand."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))

    @torch.no_grad()
    def change(self) -> None:
        """Write another value to every element."""
        for parameter in self.model.parameters():
            parameter.add_(1e-3)


class Bare:
    """One rank of the bare broadcast."""

    def join(self, address: str, rank: int, num_ranks: int, nbytes: int) -> None:
        """Join the other ranks and allocate memory, touched once."""
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
        self._data, self._copy = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def broadcast(self) -> float:
        """Return the seconds from the barrier until this rank has every byte."""
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(self._data, 0)
        return time.perf_counter() - started

    def copy(self) -> float:
        """Return the seconds of one copy of every byte."""
        dist.barrier()
        started = time.perf_counter()
        self._copy.copy_(self._data)
        return time.perf_counter() - started


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    if "--gpu" in sys.argv[1:]:
        bench_gpu.main([argument for argument in sys.argv[1:] if argument != "--gpu"])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 400])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = environment(("torch", "ray", "numpy"))
    start_ray()
    try:
        rows = [
            _measure(int(size * 1e6), args.engines, args.rounds, args.bucket_mib << 20)
            for size in args.megabytes
        ]
    finally:
        ray.shutdown()
    print_table(f"update_weights on the CPU, 1 trainer to {args.engines} engines", rows, where)
    if args.json:
        write_json(args.json, "sync", rows, where)


def _measure(nbytes: int, num_engines: int, num_rounds: int, bucket_bytes: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        save_config(directory, nbytes)
        trainer = spawn(Trainer, directory)
        engines = {f"e{i}": spawn(EngineActor, "torch", directory, f"e{i}") for i in range(num_engines)}
        with WeightSync(SyncConfig(bucket_bytes=bucket_bytes)) as sync:
            sync.register_trainers([trainer])
            sync.register_engines(engines)
            sync.connect()
            moved = sync.plan.total_nbytes
            bare = _join([spawn(Bare) for _ in range(num_engines + 1)], moved)
            times: dict[str, list[float]] = {"update": [], "broadcast": [], "copy": []}
            for version in range(1, num_rounds + 3):
                ray.get(trainer.change.remote())
                times["update"].append(sync.update_weights(version).seconds)
                times["broadcast"].append(max(ray.get([rank.broadcast.remote() for rank in bare])))
                times["copy"].append(max(ray.get([rank.copy.remote() for rank in bare])[1:]))
        for actor in (trainer, *engines.values(), *bare):
            ray.kill(actor)
    return _row(moved, times)


def _row(nbytes: int, times: dict[str, list[float]]) -> dict[str, object]:
    row: dict[str, object] = {"MB": round(nbytes / 1e6, 2)}
    for name, seconds in times.items():
        kept = [second * 1e3 for second in seconds[2:]]  # leave out the first two, which touch new memory
        row[f"{name} ms"] = round(statistics.median(kept), 2)
        row[f"{name} range"] = f"{min(kept):.1f}-{max(kept):.1f}"
    update, *parts = (statistics.median(seconds[2:]) for seconds in times.values())
    row["ratio"] = round(update / sum(parts), 3)
    row["overhead ms"] = round((update - sum(parts)) * 1e3, 2)
    return row


def _join(ranks: Sequence[ActorHandle[Any]], nbytes: int) -> Sequence[ActorHandle[Any]]:
    with tempfile.NamedTemporaryFile() as meeting:
        address = f"file://{meeting.name}"
        ray.get([rank.join.remote(address, i, len(ranks), nbytes) for i, rank in enumerate(ranks)])
    return ranks


def save_config(directory: str, nbytes: int) -> None:
    """Save the config of a Qwen3 of about `nbytes` in float32, partly embedding."""
    from transformers import Qwen3Config

    hidden, layers = (_HIDDEN, _LAYERS) if nbytes > 100e6 else (64, 2)
    per_layer = hidden * (3 * 4 * hidden + 2 * 2 * hidden)
    vocab = max(64, (nbytes // 4 - layers * per_layer) // hidden)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        vocab_size=vocab,
        tie_word_embeddings=True,
        dtype="float32",
    ).save_pretrained(directory)


def spawn(cls: type, *args: object) -> ActorHandle[Any]:
    """Start an actor that reserves no resources and is not restarted."""
    return ray.remote(cls).options(num_cpus=0, max_restarts=0).remote(*args)


def start_ray() -> None:
    """Start a cluster for this process, with one thread per actor."""
    root = str(Path(__file__).parent.parent)
    env = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ray.init(
        include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": env}
    )


if __name__ == "__main__":
    main()
