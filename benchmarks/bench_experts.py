"""Tokens to experts on two ranks, and back, by `CudaMover`.

    python -m benchmarks.bench_experts [--json FILE]

The ranks are threads of one process: on two GPUs, or on one GPU, where both share the memory's bandwidth
and no link is used. Experts are drawn uniformly, 8 of 64 for each token of 7,168 bf16 values. Rows are
aligned to 128, and zeroed where no token is, in a capacity of 1.05 times the rows of uniform choices. A call
is a CUDA graph, with the exchange of ids and weights, and the plan. Microseconds are medians of repeats of 20
calls in a row. GB/s count all bytes of rows and tokens that ranks read and write on a GPU. `copy_` reads and
writes as many bytes as the call.

Torch's chain of permutations and all-to-all is not measured here: NCCL has no two ranks on one GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo

from benchmarks.common import Row, environment, print_table, write_json
from weightsync.experts import CudaMover, ExpertGroup

NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN, ALIGNMENT = 2, 64, 8, 7168, 128
NUM_TOKENS = (4096, 128)
NUM_SMS = (0, 64, 32, 16)
REPEATS, CALLS = 9, 20
_FP8_NBYTES = HIDDEN + HIDDEN // 128 * 4
_NBYTES = HIDDEN * 2


@dataclass
class Rank:
    """A rank's inputs, and what a dispatch gave."""

    group: ExpertGroup
    stream: torch.cuda.Stream
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    rows: Any = None
    handle: Any = None

    def dispatch(self) -> None:
        self.rows, _, self.handle = self.group.dispatch(self.x, self.ids, self.weights)

    def combine(self) -> None:
        self.group.combine(self.rows, self.handle)

    def both(self) -> None:
        self.dispatch()
        self.combine()

    def plan(self) -> None:
        ids = self.ids.expand(NUM_RANKS, -1, -1)
        self.group.mover.plan(ids, NUM_EXPERTS, ALIGNMENT, self.group.capacity)


Call = Callable[[Rank], None]


def make_ranks(num_tokens: int, num_sms: int, fp8: bool) -> list[Rank]:
    store = HashStore()
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return [*pool.map(lambda rank: make_rank(store, rank, num_tokens, num_sms, fp8), range(NUM_RANKS))]


def make_rank(store: Any, rank: int, num_tokens: int, num_sms: int, fp8: bool) -> Rank:  # noqa: ANN401
    torch.cuda.set_device(rank % torch.cuda.device_count())
    process_group: Any = dist.ProcessGroup(store, rank, NUM_RANKS)
    backend = ProcessGroupGloo(store, rank, NUM_RANKS, timedelta(seconds=60))
    process_group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        # Loading kernels and allocating memory may wait for the GPU, and the GPU for a rank that waits so.
        # A mover whose kernels give up at once does both first.
        hasty = CudaMover(process_group, num_sms=num_sms, timeout_s=1e-4)
        hasty.check = lambda: None  # type: ignore[method-assign]
        hasty.gather(torch.zeros(1, len(fields(ExpertGroup)) - 1, dtype=torch.int64, device=hasty.device))
        mover = CudaMover(process_group, num_sms=num_sms)
        even = num_tokens * TOP_K * 1.05 + NUM_EXPERTS // NUM_RANKS * ALIGNMENT
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
        x = torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16()
        made = Rank(group, stream, x, ids, weights)
        for group.mover in (hasty, mover):
            made.rows = made.handle = None  # so that the second pass allocates nothing
            made.dispatch()
            if not fp8:
                made.combine()
            made.plan()
            stream.synchronize()
        assert not made.handle.dropped.any()
    return made


def graphs(ranks: Sequence[Rank], call: Call) -> list[torch.cuda.CUDAGraph]:
    made = []
    for rank in ranks:
        torch.cuda.set_device(rank.x.device)
        made.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(made[-1], stream=rank.stream):
            call(rank)
    return made


def seconds(ranks: Sequence[Rank], call: Call) -> float:
    """Return the seconds of a call: the slowest rank's median."""
    captured, times = graphs(ranks, call), list[float]()
    for _ in range(1 + REPEATS):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in ranks]  # type: ignore[no-untyped-call]
        for number in range(CALLS + 2):
            for rank, graph, (start, end) in zip(ranks, captured, events, strict=True):
                with torch.cuda.device(rank.x.device), torch.cuda.stream(rank.stream):
                    if number == 1:
                        start.record()
                    graph.replay()
                    if number == CALLS:
                        end.record()
        for rank in ranks:
            torch.cuda.synchronize(rank.x.device)
            rank.group.mover.check()
        times.append(max(start.elapsed_time(end) for start, end in events) / CALLS / 1e3)
    return statistics.median(times[1:])


def copy_seconds(nbytes: int) -> float:
    """Return the seconds of a copy that reads and writes `nbytes` together."""
    source = torch.randint(0, 100, (max(1, nbytes // 2),), dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), list[float]()
    for _ in range(1 + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(CALLS):
            target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS / 1e3)
    return statistics.median(times[1:])


def moved_nbytes(ranks: Sequence[Rank], fp8: bool) -> tuple[int, int]:
    """Return the bytes that a rank reads and writes in a dispatch, and in a combine."""
    group, num_tokens = ranks[0].group, len(ranks[0].x)
    per_row = _FP8_NBYTES if fp8 else _NBYTES
    put = num_tokens * (_NBYTES + per_row)
    needed = int(ranks[0].handle.receives.sum())
    used = int(ranks[0].handle.counts.sum())
    dispatch = put + (needed + group.capacity) * per_row
    combine = (used + 2 * needed + num_tokens) * _NBYTES
    return dispatch, combine


def rows() -> Iterator[Row]:
    num_gpus = min(NUM_RANKS, torch.cuda.device_count())
    sharing = NUM_RANKS // num_gpus
    for num_tokens in NUM_TOKENS:
        for num_sms in NUM_SMS if num_tokens == max(NUM_TOKENS) else NUM_SMS[:1]:
            for fp8 in (False, True) if not num_sms else (False,):
                ranks = make_ranks(num_tokens, num_sms, fp8)
                dispatch, combine = moved_nbytes(ranks, fp8)
                calls: dict[str, tuple[Call, int]] = {"dispatch": (Rank.dispatch, dispatch)}
                if not fp8:
                    calls["combine"] = Rank.combine, combine
                    calls["both"] = Rank.both, dispatch + combine
                    calls["plan alone"] = Rank.plan, 0
                for name, (call, nbytes) in calls.items():
                    taken = seconds(ranks, call)
                    yield {
                        "tokens per rank": num_tokens,
                        "GPUs": num_gpus,
                        "SMs per rank": num_sms or "all",
                        "call": f"{name}, FP8" if fp8 else name,
                        "µs": taken * 1e6,
                        "GB/s": sharing * nbytes / taken / 1e9,
                        "copy_ µs": copy_seconds(sharing * nbytes) * 1e6 if nbytes else "",
                        "capacity": ranks[0].group.capacity,
                        "rows": int(ranks[0].handle.counts.sum()),
                    }
                with ThreadPoolExecutor(NUM_RANKS) as pool:
                    list(pool.map(lambda rank: rank.group.mover.close(), ranks))
                del ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    where, record = environment(("torch", "cupy", "triton")), [*rows()]
    print_table("tokens to experts and back", record, where)
    if arguments.json:
        write_json(arguments.json, "experts", record, where)


if __name__ == "__main__":
    main()
