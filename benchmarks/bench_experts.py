"""Tokens to experts and back, by `CudaMover`, and by torch's permutations and NCCL's all-to-all.

    python -m benchmarks.bench_experts [--json FILE]

Two ranks if two GPUs are visible, else one. One rank uses no link: the figures then show the kernels and
of the memory. Experts are drawn uniformly, 8 of 64 for each token of 7,168 bf16 values. Rows are aligned to
128, and zeroed where no token is, in a capacity of 1.05 times the rows of uniform choices. A call is a CUDA
graph, with the exchange of ids and weights, and the plan. Microseconds are medians of repeats of 20 calls in
a row. GB/s count all bytes of rows and tokens that a rank reads and writes. `copy_` reads and writes as many
bytes as the call.

Torch's chain of permutations and all-to-all is not measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.common import Row, environment, print_table, write_json
from benchmarks.experts_by_torch import TorchChain
from weightsync.experts import CudaMover, ExpertGroup

NUM_EXPERTS, TOP_K, HIDDEN, ALIGNMENT = 64, 8, 7168, 128
NUM_TOKENS = (4096, 128)
NUM_SMS = (0, 64, 32, 16)
REPEATS, CALLS = 9, 20
_NBYTES = {False: HIDDEN * 2, True: HIDDEN + HIDDEN // 128 * 4}

Call = Callable[[], object]


@dataclass
class Rank:
    """A rank's inputs, and what its last dispatch gave."""

    mover: CudaMover
    group: ExpertGroup
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    rows: Any = None
    handle: Any = None

    @classmethod
    def make(cls, process_group: dist.ProcessGroup, num_tokens: int, num_sms: int, fp8: bool) -> Rank:
        mover = CudaMover(process_group, num_sms=num_sms, timeout_s=20)
        even = num_tokens * TOP_K * 1.05 + NUM_EXPERTS // mover.num_ranks * ALIGNMENT
        group = ExpertGroup(
            mover,
            NUM_EXPERTS,
            TOP_K,
            HIDDEN,
            num_tokens,
            alignment=ALIGNMENT,
            capacity=round(even / ALIGNMENT) * ALIGNMENT,
            drops=True,
            check=False,
            fp8=fp8,
        )
        ids = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(TOP_K).indices
        weights = torch.rand(num_tokens, TOP_K, device="cuda")
        return cls(mover, group, torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16(), ids, weights)

    def dispatch(self) -> None:
        self.rows, _, self.handle = self.group.dispatch(self.x, self.ids, self.weights)

    def combine(self) -> None:
        self.group.combine(self.rows, self.handle)

    def both(self) -> None:
        self.dispatch()
        self.combine()

    def plan(self) -> None:
        ids = self.ids.expand(self.mover.num_ranks, -1, -1)
        self.mover.plan(ids, NUM_EXPERTS, ALIGNMENT, self.group.capacity)

    def moved_nbytes(self) -> tuple[int, int]:
        """Return the bytes that the rank reads and writes in a dispatch, and in a combine."""
        num_tokens, per_row = len(self.x), _NBYTES[self.group.fp8]
        needed, used = int(self.handle.receives.sum()), int(self.handle.counts.sum())
        dispatch = num_tokens * (_NBYTES[False] + per_row) + (needed + self.group.capacity) * per_row
        return dispatch, (used + 2 * needed + num_tokens) * _NBYTES[False]


def graph_of(call: Call) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def seconds(call: Call) -> float:
    """Return the median seconds of a call on this rank."""
    times = list[float]()
    for _ in range(1 + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        call()
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS / 1e3)
    return statistics.median(times[1:])


def copy_seconds(nbytes: int) -> float:
    """Return the seconds of a copy that reads and writes `nbytes` together."""
    source = torch.randint(0, 100, (max(1, nbytes // 2),), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return seconds(copy)


def rows(process_group: dist.ProcessGroup) -> Iterator[Row]:
    cases = [(4096, 0, False), (4096, 0, True), (128, 0, False), (128, 0, True)]
    cases += [(4096, num_sms, False) for num_sms in NUM_SMS[1:]]
    for num_tokens, num_sms, fp8 in cases:
        rank = Rank.make(process_group, num_tokens, num_sms, fp8)
        rank.dispatch()
        assert not rank.handle.dropped.any()
        dispatch, combine = rank.moved_nbytes()
        calls: dict[str, tuple[Call, int]] = {"dispatch": (rank.dispatch, dispatch)}
        if not fp8:
            calls["combine"] = rank.combine, combine
            calls["both"] = rank.both, dispatch + combine
            calls["plan alone"] = rank.plan, 0
        for name, (call, nbytes) in calls.items():
            graph = graph_of(call)
            taken = seconds(graph.replay)
            rank.mover.check()
            yield {
                "tokens per rank": num_tokens,
                "ranks": rank.mover.num_ranks,
                "SMs": num_sms or "all",
                "call": f"{name}, FP8" if fp8 else name,
                "µs": taken * 1e6,
                "GB/s": nbytes / taken / 1e9,
                "copy_ µs": copy_seconds(nbytes) * 1e6 if nbytes else "",
                "capacity": rank.group.capacity,
                "rows": int(rank.handle.counts.sum()),
            }
            del graph
        if (num_tokens, num_sms, fp8) == cases[0]:
            yield from torch_rows(rank)
        rank.mover.close()


def torch_rows(rank: Rank) -> Iterator[Row]:
    """Measure torch's chain with the same tokens."""
    chain = TorchChain(rank.x, rank.ids, rank.weights, NUM_EXPERTS)
    chain.dispatch()
    rank.dispatch()
    places = zip(rank.handle.offsets.tolist(), rank.handle.counts.tolist(), strict=False)
    used = torch.cat([rank.rows[first : first + num] for first, num in places])
    assert torch.equal(chain.rows.view(torch.int16), used.view(torch.int16))
    calls = {
        "dispatch": chain.dispatch,
        "combine": chain.combine,
        "both": chain.both,
        "all-to-all": chain.bare,
    }
    for name, call in calls.items():
        yield {
            "tokens per rank": len(rank.x),
            "ranks": rank.mover.num_ranks,
            "SMs": "",
            "call": f"torch, {name}",
            "µs": seconds(call) * 1e6,
            "GB/s": "",
            "copy_ µs": "",
            "capacity": "",
            "rows": len(chain.rows),
        }


def run(rank: int, num_ranks: int, folder: Path) -> None:
    """Measure as a rank. The first rank prints each row, and writes all to the folder."""
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{folder}/store", rank=rank, world_size=num_ranks)
    assert dist.group.WORLD is not None
    record = []
    for row in rows(dist.group.WORLD):
        record.append(row)
        if not rank:
            print(*(f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row.values()), flush=True)
            (folder / "rows.json").write_text(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    num_ranks = min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spawn(run, (num_ranks, folder), num_ranks)  # type: ignore[no-untyped-call]
        record = json.loads((folder / "rows.json").read_text())
    where = environment(("torch", "cupy", "triton"))
    print_table("tokens to experts and back", record, where)
    if arguments.json:
        write_json(arguments.json, "experts", record, where)


if __name__ == "__main__":
    main()
