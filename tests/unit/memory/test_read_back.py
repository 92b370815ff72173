"""Copies and the digests that follow them make what copies and digests one after the other make."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.memory.test_digest_tiles import add
from weightsync.memory.kernels.digest_tiles import TILE_NBYTES, DigestPart, digest_runs
from weightsync.memory.kernels.read_back import ReadBack
from weightsync.plan import Box
from weightsync.plan.layout.copies import Copies, Copy, tiles
from weightsync.plan.layout.layout import Int64

SIZE = 1 << 17
START = 1 << 20
"""The address of the target's first byte. The source begins at 0 and has as many bytes."""


@st.composite
def targets(draw: st.DrawFn) -> tuple[list[DigestPart], list[Copy]]:
    """Parts of tensors one after the other in memory, and copies that write them in any cut and order."""
    parts, copies, at = list[DigestPart](), list[Copy](), 0
    itemsize = draw(st.sampled_from([1, 2, 4]))
    for number in range(draw(st.integers(1, 4))):
        at += draw(st.sampled_from([0, 16, 4]))
        unit = draw(st.sampled_from([16, 16, 4])) // itemsize
        rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 30)) * unit
        left, right = (draw(st.sampled_from([0, 0, 8, 1])) * unit for _ in range(2))
        nbytes, wide = rows * columns * itemsize, (left + columns + right)
        box = Box((0, left), (rows, columns))
        strides = (columns * itemsize, itemsize)
        parts.append(
            DigestPart(
                tensor=number,
                address=START + at,
                strides=strides,
                box=box,
                shape=(rows, wide),
                itemsize=itemsize,
            )
        )
        copies += draw(writes(at, rows, columns * itemsize))
        at += nbytes
    assert at <= SIZE
    return parts, draw(st.permutations(copies))


@st.composite
def writes(draw: st.DrawFn, at: int, rows: int, row_nbytes: int) -> list[Copy]:
    """Copies to `rows` contiguous rows: of rows of another pitch, or of bytes, cut anywhere."""
    if draw(st.booleans()):
        pitch = row_nbytes + draw(st.sampled_from([16, 4]))
        ends = sorted(draw(st.sets(st.integers(1, rows), max_size=2)) | {rows})
        starts = [0, *ends[:-1]]
        return [
            (first * pitch, START + at + first * row_nbytes, end - first, row_nbytes, pitch, row_nbytes)
            for first, end in zip(starts, ends, strict=True)
        ]
    nbytes = rows * row_nbytes
    ends = sorted(draw(st.sets(st.integers(1, -(-nbytes // 8)), max_size=3)) | {-(-nbytes // 8)})
    bounds = [0, *(min(8 * end, nbytes) for end in ends)]
    shift = draw(st.sampled_from([0, 16, 8]))
    pairs = itertools.pairwise(bounds)
    return [(shift + b, START + at + b, 1, e - b, e - b, e - b) for b, e in pairs if e > b]


def run(table: Int64, memory: np.ndarray, target: np.ndarray) -> None:
    for src, dst, rows, row_nbytes, src_pitch, dst_pitch in table.tolist():
        for row in range(rows):
            to = dst - START + row * dst_pitch
            target[to : to + row_nbytes] = memory[src + row * src_pitch :][:row_nbytes]


@given(targets(), st.integers(0, 3))
def test_pairs_are_copies_with_their_digests_and_the_rest_is_left(
    drawn: tuple[list[DigestPart], list[Copy]], seed: int
) -> None:
    parts, copies = drawn
    memory = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
    table = Copies.of(copies)
    wanted, wanted_digests = np.zeros(SIZE, np.uint8), np.zeros(len(parts), np.uint64)
    run(table.table(), memory, wanted)
    found, digests = np.zeros(SIZE, np.uint8), np.zeros(len(parts), np.uint64)
    for word, runs in digest_runs(parts).items():
        add(wanted_digests, runs, word, wanted, START)
        back = ReadBack.find(table, runs)
        run(tiles(back.copies, TILE_NBYTES)[0], memory, found)
        paired = back.tiles()
        assert not (paired[:, [0, 1, 3, 8]] % 16).any(), "whole units"
        assert not (paired[paired[:, 2] > 1][:, [4, 5, 9]] % 16).any()
        assert (paired[:, 2] * paired[:, 3] <= TILE_NBYTES).all()
        run(paired[:, [8, 0, 2, 3, 9, 4]], memory, found)
        add(digests, paired[:, :8], word, found, START)
        add(digests, back.runs, word, found, START)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(digests, wanted_digests)


def test_a_tensor_in_several_copies_is_taken_whole_and_in_their_order() -> None:
    part = DigestPart(
        tensor=3, address=START, strides=(8192, 2), box=Box.whole((16, 4096)), shape=(16, 4096), itemsize=2
    )
    halves = [(1 << 17, START + (1 << 16), 1, 1 << 16, 1, 1), (0, START, 1, 1 << 16, 1, 1)]
    back = ReadBack.find(Copies.of(halves), digest_runs([part])[2])
    assert back.pairs[:, [0, 1, 3, 6, 8]].tolist() == [
        [START + (1 << 16), 1 << 16, 1 << 16, 3, 1 << 17],
        [START, 0, 1 << 16, 3, 0],
    ]
    assert len(back.copies) == len(back.runs) == 0


def test_columns_of_a_matrix_are_taken_too() -> None:
    part = DigestPart(
        tensor=0, address=START, strides=(64, 2), box=Box((0, 32), (4, 32)), shape=(4, 64), itemsize=2
    )
    copies = [(0, START, 2, 64, 80, 64), (1024, START + 128, 1, 128, 1, 1)]
    back = ReadBack.find(Copies.of(copies), digest_runs([part])[2])
    assert back.pairs[:, [1, 2, 3, 5, 9]].tolist() == [[64, 2, 64, 128, 80], [320, 2, 64, 128, 64]]


def test_a_tensor_that_is_not_all_written_is_left() -> None:
    part = DigestPart(
        tensor=0, address=START, strides=(64, 2), box=Box.whole((4, 32)), shape=(4, 32), itemsize=2
    )
    for last in [(256, START + 136, 1, 120, 1, 1), (264, START + 128, 1, 128, 1, 1)]:
        back = ReadBack.find(Copies.of([(0, START, 1, 128, 1, 1), last]), digest_runs([part])[2])
        assert (len(back.pairs), len(back.copies), len(back.runs)) == (0, 2, 1)
