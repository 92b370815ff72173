"""Rates of the device kernels on one GPU: segment copies and digests.

    python -m benchmarks.bench_kernels [--json FILE]

Copies go from shards, as in a trainer or an engine, to one packed buffer:

- contiguous: one segment;
- rows: separate segments of 4 MiB;
- columns: segments of 32 MiB, a quarter of each row of a matrix: rows of 1, 4 or 6 KiB;
- swapped: transposed matrices, as for experts that a trainer stores input-major.

GB/s of copies count bytes read and written, GB/s of digests count bytes read. Copies with digests of the
written bytes are in milliseconds: a copy and then a digest, and both by one kernel. Medians over calls
between CUDA events on an idle stream, of random data. Consecutive calls use different memory, more than the
L2 cache. Needs 24 GiB of device memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.common import Row, environment, print_table, write_json
from benchmarks.triton_copy import TritonCopy
from weightsync.memory.kernels.device_kernels import CopyTable, DigestTable, WrittenDigests
from weightsync.memory.kernels.digest_tiles import DigestPart
from weightsync.plan import Box
from weightsync.plan.layout.copies import BoxCopy, Copies, box_copies

MIB = 1 << 20
SIZES = (256 * MIB, 4096 * MIB)
LAYOUTS = {
    "contiguous": 0,
    "rows": 0,
    "columns 1 KiB": 1024,
    "columns 4 KiB": 4096,
    "columns 6 KiB": 6144,
    "swapped": 0,
}
CONTIGUOUS = [layout for layout in LAYOUTS if layout != "swapped"]
"""Layouts with contiguous rows, which Triton's copy and the digest's parts need."""
NUM_BLOCKS = (16, 32, 66, 132, 264, 528)
PARTS = 4
REPEATS = 9

Pair = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Pools:
    """Random int16 memory: shards of `PARTS` times the largest size, and a packed buffer."""

    shards: torch.Tensor
    packed: torch.Tensor

    @classmethod
    def fill(cls) -> Pools:
        shards = torch.empty(PARTS * max(SIZES) // 2, dtype=torch.int16, device="cuda")
        for chunk in shards.chunk(PARTS):  # random_ counts in 32 bits
            chunk.view(torch.int32).random_()
        return cls(shards, torch.zeros(max(SIZES) // 2, dtype=torch.int16, device="cuda"))

    def turns(self, nbytes: int) -> Iterator[Pair]:
        """Yield shards of 4 * `nbytes` and a packed buffer, for up to 4 calls."""
        for turn in range(min(4, max(SIZES) // nbytes)):
            first = turn * nbytes // 2
            yield (
                self.shards[PARTS * first : PARTS * (first + nbytes // 2)],
                self.packed[first : first + nbytes // 2],
            )


def segments(layout: str, shards: torch.Tensor, packed: torch.Tensor) -> list[Pair]:
    """Return the copies: (source, target) views of equal shapes."""
    if layout == "contiguous":
        return [(shards[: len(packed)], packed)]
    if layout == "rows":
        size = 4 * MIB // 2
        return list(zip(_split(shards, size)[::PARTS], _split(packed, size), strict=True))
    if layout == "swapped":
        numel = len(packed) // (768 * 2048) * 768 * 2048
        return list(
            zip(shards[:numel].view(-1, 2048, 768).mT, packed[:numel].view(-1, 768, 2048), strict=True)
        )
    width = LAYOUTS[layout] // 2
    targets = _split(packed[: len(packed) // width * width].view(-1, width), 32 * MIB // 2 // width)
    sources = shards[: sum(map(len, targets)) * width * PARTS].view(-1, width * PARTS)
    return list(zip(_split(sources[:, width : 2 * width], len(targets[0])), targets, strict=True))


def _split(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[start : start + size] for start in range(0, len(tensor), size))


def copies(pairs: Sequence[Pair]) -> Copies:
    boxes: list[BoxCopy] = []
    for source, target in pairs:
        strides = [[2 * stride for stride in side.stride()] for side in (source, target)]
        boxes.append((source.shape, 2, source.data_ptr(), strides[0], target.data_ptr(), strides[1]))
    return Copies(*box_copies(boxes)[0].T)


def seconds(calls: Sequence[Call]) -> float:
    """Return the median seconds of one call. Calls take turns, after a warm-up."""
    for call in calls:
        call()
    times: list[float] = []
    for repeat in range(REPEATS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        calls[repeat % len(calls)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def kernel_call(pairs: Sequence[Pair], num_blocks: int | None = None) -> Call:
    rows = copies(pairs)
    table = CopyTable(rows, [0, len(rows)], num_blocks)
    return lambda: table.launch(0, torch.cuda.current_stream())


def triton_call(pairs: Sequence[Pair]) -> Call:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return TritonCopy(copies(pairs), 4 * processors).launch


def each_call(pairs: Sequence[Pair]) -> Call:
    def call() -> None:
        for source, target in pairs:
            target.copy_(source)

    return call


def foreach_call(pairs: Sequence[Pair]) -> Call:
    sources, targets = zip(*pairs, strict=True)
    return lambda: torch._foreach_copy_(targets, sources)


METHODS = {"nvrtc": kernel_call, "triton": triton_call, "copy_": each_call, "foreach": foreach_call}


def check(pairs: Sequence[Pair], name: str) -> None:
    for _, target in pairs:
        target.zero_()
    METHODS[name](pairs)()
    for source, target in pairs:
        assert torch.equal(source, target), f"{name} copied wrongly"


def copy_rows(pools: Pools) -> Iterator[Row]:
    for nbytes in SIZES:
        plain = [each_call([(shards[: len(packed)], packed)]) for shards, packed in pools.turns(nbytes)]
        memcpy = 2 * nbytes / seconds(plain) / 1e9
        for layout in LAYOUTS if nbytes == SIZES[0] else CONTIGUOUS:
            turns = [segments(layout, *turn) for turn in pools.turns(nbytes)]
            moved = 2 * sum(target.nbytes for _, target in turns[0])
            row: dict[str, object] = {"layout": layout, "MiB": nbytes // MIB, "segments": len(turns[0])}
            for name, make in METHODS.items():
                if name == "triton" and layout not in CONTIGUOUS:
                    continue
                check(turns[0], name)
                row[f"{name} GB/s"] = moved / seconds([make(pairs) for pairs in turns]) / 1e9
            row["device to device GB/s"] = memcpy
            yield row


def block_rows(pools: Pools) -> Iterator[Row]:
    """Yield rates of our copy and digest of 256 MiB, by thread blocks."""
    nbytes = SIZES[0]
    for num_blocks in NUM_BLOCKS:
        row: dict[str, object] = {"blocks": num_blocks}
        for layout in ("contiguous", "columns 1 KiB", "columns 4 KiB"):
            turns = [segments(layout, *turn) for turn in pools.turns(nbytes)]
            moved = sum(target.nbytes for _, target in turns[0])
            calls = [kernel_call(pairs, num_blocks) for pairs in turns]
            row[f"copy {layout}"] = 2 * moved / seconds(calls) / 1e9
            calls = [digest_call(pairs, 2, num_blocks) for pairs in turns]
            row[f"digest {layout}"] = moved / seconds(calls) / 1e9
        yield row


def digest_call(pairs: Sequence[Pair], itemsize: int, num_blocks: int | None = None) -> Call:
    """Return a call that digests sources, the second quarter of each tensor's columns."""
    table = DigestTable(
        [digest_part(number, source, itemsize) for number, (source, _) in enumerate(pairs)],
        len(pairs),
        num_blocks,
    )
    return lambda: table.launch(torch.cuda.current_stream())


def written_rows(pools: Pools) -> Iterator[Row]:
    """Yield milliseconds of copies and later digests, and of both by one kernel."""
    for nbytes in SIZES:
        for layout in CONTIGUOUS:
            turns = [segments(layout, *turn) for turn in pools.turns(nbytes)]
            row: dict[str, object] = {"layout": layout, "MiB": nbytes // MIB}
            for name, make in {"one after the other": after_call, "together": written_call}.items():
                row[f"{name} ms"] = 1e3 * seconds([make(pairs) for pairs in turns])
            yield row


def after_call(pairs: Sequence[Pair]) -> Call:
    """Return a call that copies, and then digests the targets."""
    copy, table = kernel_call(pairs), DigestTable(target_parts(pairs), len(pairs))

    def call() -> None:
        copy()
        table.launch(torch.cuda.current_stream())

    return call


def written_call(pairs: Sequence[Pair]) -> Call:
    """Return a call that digests targets as it writes them."""
    table = WrittenDigests(copies(pairs), target_parts(pairs), len(pairs))
    return lambda: table.launch(torch.cuda.current_stream())


def target_parts(pairs: Sequence[Pair]) -> list[DigestPart]:
    """Return targets as whole tensors, or as a quarter of a matrix' columns."""
    return [
        replace(
            digest_part(n, source, 2),
            address=target.data_ptr(),
            strides=tuple(2 * each for each in target.stride()),
        )
        for n, (source, target) in enumerate(pairs)
    ]


def digest_part(number: int, source: torch.Tensor, itemsize: int) -> DigestPart:
    extent = (*source.shape[:-1], source.shape[-1] * 2 // itemsize)
    offset = (0,) if source.ndim == 1 else (0, extent[-1])
    whole = extent if source.ndim == 1 else (extent[0], extent[1] * PARTS)
    return DigestPart(
        tensor=number,
        address=source.data_ptr(),
        strides=(*(2 * stride for stride in source.stride()[:-1]), itemsize),
        box=Box(offset, extent),
        shape=whole,
        itemsize=itemsize,
    )


def digest_rows(pools: Pools) -> Iterator[Row]:
    for nbytes in SIZES:
        for layout in CONTIGUOUS:
            turns = [segments(layout, *turn) for turn in pools.turns(nbytes)]
            read = sum(source.nbytes for source, _ in turns[0])
            row: dict[str, object] = {"layout": layout, "MiB": nbytes // MIB}
            for itemsize in (1, 2, 4):
                calls = [digest_call(pairs, itemsize) for pairs in turns]
                row[f"{itemsize}-byte words GB/s"] = read / seconds(calls) / 1e9
            yield row


def host_rows(pools: Pools) -> Iterator[Row]:
    """Yield the host's time for a table of 4 GiB and one launch."""
    for layout in LAYOUTS:
        pairs = segments(layout, *next(pools.turns(max(SIZES))))
        start = time.perf_counter()
        rows = copies(pairs)
        table = CopyTable(rows, [0, len(rows)])
        built = time.perf_counter() - start
        small = CopyTable(
            Copies.of([(pools.shards.data_ptr(), pools.packed.data_ptr(), 1, 16, 16, 16)]), [0, 1]
        )
        stream = torch.cuda.current_stream()
        table.launch(0, stream)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            small.launch(0, stream)
        launched = (time.perf_counter() - start) / 200
        torch.cuda.synchronize()
        yield {"layout": layout, "table of 4 GiB ms": built * 1e3, "launch µs": launched * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    where = environment(("torch", "cupy", "triton"))
    pools = Pools.fill()
    tables = {
        "segment copies": copy_rows,
        "digests": digest_rows,
        "copies with digests of their targets": written_rows,
        "by thread blocks, 256 MiB, GB/s": block_rows,
        "on the host": host_rows,
    }
    record: list[Row] = []
    for title, measure_rows in tables.items():
        rows = list(measure_rows(pools))
        print_table(title, rows, where)
        record += [{"table": title, **row} for row in rows]
    if arguments.json:
        write_json(arguments.json, "kernels", record, where)


if __name__ == "__main__":
    main()
