"""Times planning, from 1,000 to 70,000 tensors.

    python -m benchmarks.bench_plan [--json FILE]

The model has the shape of Kimi K2 (61 layers, hidden size 7168, 384 experts of 2048, 3 matrices
each, 1 byte an element), cut to the wanted number of tensors:

- 128 trainer ranks in 16 groups of 8. An expert belongs to one group, and the group's ranks hold row
  blocks of the expert. Dense tensors (8 in a layer) are row blocks over all 128 ranks.
- 16 engines of 8 ranks (128 engine ranks, 256 holders). A rank holds every eighth expert, whole, and row
  blocks of the dense tensors. All tensors are live parameters, so that coverage is proven byte for byte.

Direct plans are timed on the layouts of `weightsync plan`: for all ranks of an engine, or for one rank
of Kimi K2 from 256 trainers to engines of 16 ranks. Peak memory is the memory that Python and numpy allocate
for the layouts of both sides and for the plan, without the list of tensors.
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.common import environment, measure, print_table, write_json
from weightsync.plan import Layout, Members, Plan, TensorMeta, make_plan
from weightsync.plan.direct.direct import Reads, Reshard
from weightsync.recipes.forecast import grids
from weightsync.recipes.forecast.catalog import load
from weightsync.recipes.forecast.parallel import parse_engine, parse_trainers
from weightsync.recipes.forecast.shapes import ModelShape, checkpoint_tensors

NUM_TRAINERS, GROUP, NUM_ENGINES, TENSOR_PARALLEL = 128, 8, 16, 8
HIDDEN, EXPERT, NUM_EXPERTS, DENSE = 7168, 2048, 384, 8
SIZES = (1_000, 5_000, 20_000, 70_000)


def tensors(count: int) -> tuple[TensorMeta, ...]:
    """Return the first `count` tensors: per layer the dense tensors, then the experts."""
    layer = DENSE + 3 * NUM_EXPERTS
    return tuple(_tensor(number // layer, number % layer) for number in range(count))


def _tensor(layer: int, number: int) -> TensorMeta:
    if number < DENSE:
        return TensorMeta(f"model.layers.{layer}.dense.{number}.weight", "bfloat16", (HIDDEN, 1024))
    expert, part = divmod(number - DENSE, 3)
    name = f"model.layers.{layer}.mlp.experts.{expert}.{('gate', 'up', 'down')[part]}_proj.weight"
    return TensorMeta(name, "float8_e4m3fn", (HIDDEN, EXPERT) if part == 2 else (EXPERT, HIDDEN))


def trainer_layout(metas: tuple[TensorMeta, ...]) -> Layout:
    """Return row blocks: experts over their group's 8 ranks, dense tensors over all."""
    is_expert, expert = _kinds(len(metas))
    group = expert % (NUM_TRAINERS // GROUP)
    experts, dense = np.flatnonzero(is_expert), np.flatnonzero(~is_expert)
    tensor = np.concatenate([np.repeat(experts, GROUP), np.repeat(dense, NUM_TRAINERS)])
    part = np.concatenate(
        [np.tile(np.arange(GROUP), len(experts)), np.tile(np.arange(NUM_TRAINERS), len(dense))]
    )
    parts = np.where(is_expert[tensor], GROUP, NUM_TRAINERS)
    rank = np.where(is_expert[tensor], group[tensor] * GROUP + part, part)
    return _rows(metas, tensor, part, parts, rank, NUM_TRAINERS, live=False)


def engine_layout(metas: tuple[TensorMeta, ...]) -> Layout:
    """Return whole experts, assigned in turn, and row blocks of dense tensors."""
    is_expert, expert = _kinds(len(metas))
    experts, dense = np.flatnonzero(is_expert), np.flatnonzero(~is_expert)
    tensor = np.concatenate([experts, np.repeat(dense, TENSOR_PARALLEL)])
    shard = np.tile(np.arange(TENSOR_PARALLEL), len(dense))
    part = np.concatenate([np.zeros(len(experts), np.int64), shard])
    parts = np.where(is_expert[tensor], 1, TENSOR_PARALLEL)
    rank = np.concatenate([expert[experts] % TENSOR_PARALLEL, shard])
    return _rows(metas, tensor, part, parts, rank, TENSOR_PARALLEL, live=True)


def _kinds(count: int) -> tuple[np.ndarray, np.ndarray]:
    number = np.arange(count) % (DENSE + 3 * NUM_EXPERTS)
    return number >= DENSE, (number - DENSE) // 3


def _rows(
    metas: tuple[TensorMeta, ...],
    tensor: np.ndarray,
    part: np.ndarray,
    parts: np.ndarray,
    rank: np.ndarray,
    num_ranks: int,
    live: bool,
) -> Layout:
    shape = np.array([meta.shape for meta in metas], np.int64)[tensor]
    extent = np.stack([shape[:, 0] // parts, shape[:, 1]], axis=1)
    offset = np.stack([extent[:, 0] * part, np.zeros_like(part)], axis=1)
    buffers = (
        tuple(
            (r, TensorMeta(metas[t].name, metas[t].dtype, (rows, columns)))
            for r, t, (rows, columns) in zip(rank.tolist(), tensor.tolist(), extent.tolist(), strict=True)
        )
        if live
        else ()
    )
    return Layout.from_columns(
        tensors=metas,
        num_ranks=num_ranks,
        tensor=tensor,
        rank=rank,
        offset=offset,
        extent=extent,
        buffers=buffers,
    )


def members() -> Members:
    ranks = range(NUM_TRAINERS, NUM_TRAINERS + NUM_ENGINES * TENSOR_PARALLEL)
    engines = tuple(
        (f"e{number:02}", tuple(ranks[number * TENSOR_PARALLEL : (number + 1) * TENSOR_PARALLEL]))
        for number in range(NUM_ENGINES)
    )
    return Members(ranks.stop, tuple(range(NUM_TRAINERS)), engines)


def plan(source: Layout, engines: Mapping[str, Layout], fleet: Members) -> Plan:
    return make_plan(source, engines, fleet, bucket_bytes=256 << 20, max_staging_bytes=1 << 30)


def growth_exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of log(seconds) over log(size); 1 is linear."""
    slope, _ = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(slope)


def run(count: int) -> dict[str, object]:
    metas = tensors(count)
    source, fleet = trainer_layout(metas), members()
    engines = {name: engine_layout(tensors(count)) for name, _ in fleet.engines}
    timing, made = measure(lambda: plan(source, engines, fleet))
    digest, _ = measure(made.digest)
    bucket, _ = measure(lambda: made.bucket(made.num_buckets // 2))
    return {
        "tensors": count,
        "segments": sum(len(layout.tensor) for layout in (source, *engines.values())),
        "GiB": made.total_nbytes / 2**30,
        "pieces": made.num_pieces,
        "buckets": made.num_buckets,
        "steps": len(made.step_trainer),
        "plan s": timing.median,
        "us/tensor": timing.median / count * 1e6,
        "digest s": digest.median,
        "bucket ms": bucket.median * 1e3,
        "imbalance": made.explain().imbalance,
    }


DIRECT = (
    ("qwen3-30b-a3b", "fsdp=8", "tp=8", None),
    ("qwen3-30b-a3b", "fsdp=32", "tp=16", None),
    ("kimi-k2", "tp=8,ep=32,pp=8,dp=4", "tp=16", 5),
)
"""Model, trainers, engine, and the rank to plan; None plans all."""


def direct(model_name: str, trainers: str, engine_cut: str, only: int | None) -> dict[str, object]:
    model = load(ModelShape, model_name, field="model", kind="models")
    metas, parallel, cut = checkpoint_tensors(model), parse_trainers(trainers), parse_engine(engine_cut)
    ranks = range(cut.num_ranks) if only is None else range(only, only + 1)
    source, engine = grids.trainer_layout(metas, model, parallel), grids.engine_layout(metas, model, cut)
    once, _ = measure(lambda: Reshard(source, "e0", engine))
    timing, reads = measure(lambda: plan_ranks(source, engine, ranks))
    tracemalloc.start()
    plan_ranks(grids.trainer_layout(metas, model, parallel), grids.engine_layout(metas, model, cut), ranks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "layouts": f"{model_name}, {trainers} to {engine_cut}",
        "tensors": len(metas),
        "held": len(source.tensor),
        "taken": len(engine.tensor),
        "ranks planned": len(ranks),
        "plan s": timing.median,
        "of it once s": once.median,
        "copies/rank": len(reads),
        "GiB/rank": reads.nbytes / 2**30,
        "peak MiB": peak / 2**20,
    }


def plan_ranks(source: Layout, engine: Layout, ranks: range) -> Reads:
    """Plan all `ranks`. Returns the last rank's reads."""
    reshard = Reshard(source, "e0", engine)
    return [reshard.reads(rank, [1] * source.num_ranks) for rank in ranks][-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows and where they were measured")
    args = parser.parse_args()
    rows = [run(count) for count in SIZES]
    exponent = growth_exponent(list(SIZES), [float(str(row["plan s"])) for row in rows])
    where = environment(("numpy", "torch", "ray"))
    note = f"growth: seconds ~ tensors^{exponent:.2f}; {members().num_holders} ranks, median of 3"
    print_table("make_plan", rows, where, [note])
    resharded = [direct(*case) for case in DIRECT]
    print_table("Reshard", resharded, where, ["median of 3; the last rank's copies and GiB"])
    if args.json:
        write_json(args.json, "plan", [*rows, *resharded], where)


if __name__ == "__main__":
    main()
