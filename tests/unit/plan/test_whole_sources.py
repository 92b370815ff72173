"""What one dense copy would fill is found, and nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from tests.unit.plan.reshard_strategies import Sides, sides
from weightsync.plan.direct.direct import Reads
from weightsync.plan.direct.whole_sources import whole_sources


@given(sides())
def test_a_source_has_the_bytes_that_copies_would_bring(made: Sides) -> None:
    for rank in range(len(made.ranks)):
        reads = made.reshard().reads(rank, [1] * len(made.trainers))
        found = whole_sources(reads)
        brought = _bytes(reads)
        for name, source in found.items():
            for to, came in brought[name].items():
                assert came == (*source.key, source.offset + to)
        for name in brought.keys() - found.keys():
            starts = {(*key, at - to) for to, (*key, at) in brought[name].items()}
            has_gaps = len(brought[name]) < max(brought[name]) + 1
            assert len(starts) > 1 or has_gaps, "one dense copy fills it"


def _bytes(reads: Reads) -> dict[str, dict[int, tuple[int, str, int]]]:
    """Return where each byte of each target comes from."""
    found: dict[str, dict[int, tuple[int, str, int]]] = {}
    for number, (src, dst, rows, nbytes, src_pitch, dst_pitch) in enumerate(reads.table().tolist()):
        target = found.setdefault(reads.dst_names[reads.dst_buffer[number]], {})
        buffer = reads.src_names[reads.src_buffer[number]]
        for row, column in np.ndindex(rows, nbytes):
            to, at = dst + row * dst_pitch + column, src + row * src_pitch + column
            target[to] = int(reads.trainer[number]), buffer, at
    return found
