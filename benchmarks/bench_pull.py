"""Reads another GPU's memory by kernel and copy engine, while an engine decodes.

    python -m benchmarks.bench_pull [--gib 4] [--json FILE]                              two GPUs

``GB/s`` rows: contiguous blocks of one size, `--gib` in all, from the other GPU's memory to this GPU's
memory, by one launch of the kernel (``kernel``, with the thread blocks of a direct copy) and by one
asynchronous copy per block (``engine``). Medians over calls between CUDA events on an idle stream.

``decode`` rows: a chain of matrix-vector products, bound by this GPU's memory as decoding is, runs alone and
during reads of either kind on another stream. ``slower`` is the ratio of both times, by CUDA events around
the chain.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from cupy.cuda import runtime

from benchmarks.common import Row, environment, print_table, write_json
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.plan.layout.copies import Copies

MIB = 1 << 20
BLOCKS_MIB = (0.25, 1, 4, 16, 64, 1024)
REPEATS = 9
_NUM_BLOCKS = 264  # two for each multiprocessor of an H200
_LAYERS, _WIDTH = 32, 8192

Read = Callable[[torch.cuda.Stream], None]


def main() -> None:
    """Parse arguments, measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("needs two GPUs")
    where = environment()
    nbytes = int(args.gib * 1024) * MIB
    far = torch.empty(nbytes // 4, dtype=torch.int32, device="cuda:1").random_()
    near = torch.zeros(nbytes // 4, dtype=torch.int32, device="cuda:0")
    runtime.setDevice(0)
    runtime.deviceEnablePeerAccess(1)
    rates = [row for size in BLOCKS_MIB for row in _rates(far, near, int(size * MIB))]
    decode = _decode_rows(far, near)
    print_table("reading another GPU's memory", rates, where)
    print_table("decoding meanwhile", decode, where)
    if args.json:
        write_json(args.json, "pull", [*rates, *decode], where)


def _reads(
    far: torch.Tensor, near: torch.Tensor, block: int, num_blocks: int = _NUM_BLOCKS
) -> dict[str, Read]:
    starts = np.arange(0, near.nbytes, block)
    copies = [(far.data_ptr() + s, near.data_ptr() + s, 1, block, block, block) for s in starts.tolist()]
    table = CopyTable(Copies.of(copies), (0, len(copies)), num_blocks)

    def engine(stream: torch.cuda.Stream) -> None:
        for source, target, _, size, _, _ in copies:
            runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream.cuda_stream)

    return {"kernel": lambda stream: table.launch(0, stream), "engine": engine}


def _rates(far: torch.Tensor, near: torch.Tensor, block: int) -> list[Row]:
    rows: list[Row] = []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for name, read in _reads(far, near, block).items():
        near.zero_()
        torch.cuda.synchronize()
        seconds = [_timed(stream, functools.partial(read, stream)) for _ in range(REPEATS + 1)][1:]
        if not torch.equal(near.to(far.device), far):
            raise RuntimeError(f"{name} with blocks of {block} bytes copied something else")
        rates = [near.nbytes / each / 1e9 for each in seconds]
        rows.append(
            {
                "by": name,
                "block MiB": block / MIB,
                "GB/s": statistics.median(rates),
                "range": f"{min(rates):.0f}-{max(rates):.0f}",
            }
        )
    return rows


def _decode_rows(far: torch.Tensor, near: torch.Tensor) -> list[Row]:
    weights = [torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16, device="cuda:0") for _ in range(_LAYERS)]
    state = torch.randn(_WIDTH, 8, dtype=torch.bfloat16, device="cuda:0")
    decoding, reading = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    alone = statistics.median(_timed(decoding, lambda: _decode(weights, state)) for _ in range(REPEATS))
    rows: list[Row] = [{"beside": "nothing", "decode ms": alone * 1e3, "slower": 1.0}]
    beside = {f"kernel, {n} blocks": _reads(far, near, 64 * MIB, n)["kernel"] for n in (_NUM_BLOCKS, 32)}
    beside["engine"] = _reads(far, near, 64 * MIB)["engine"]
    for name, read in beside.items():
        taken = statistics.median(_beside(decoding, reading, read, weights, state) for _ in range(REPEATS))
        rows.append({"beside": name, "decode ms": taken * 1e3, "slower": taken / alone})
    return rows


def _beside(
    decoding: torch.cuda.Stream,
    reading: torch.cuda.Stream,
    read: Read,
    weights: Sequence[torch.Tensor],
    state: torch.Tensor,
) -> float:
    """Return the seconds of decoding while `read` runs, which takes longer."""
    begun = reading.record_event()
    for _ in range(4):
        read(reading)
    ended = reading.record_event()
    begun.synchronize()
    seconds = _timed(decoding, lambda: _decode(weights, state), wait=False)
    if ended.query():
        raise RuntimeError("the reads ended first: give more --gib")
    torch.cuda.synchronize()
    return seconds


def _decode(weights: Sequence[torch.Tensor], state: torch.Tensor) -> None:
    for weight in weights:
        state = weight @ state


def _timed(stream: torch.cuda.Stream, work: Callable[[], None], wait: bool = True) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    if wait:
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        start.record()
        work()
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    main()
