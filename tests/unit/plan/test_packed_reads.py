"""Reads arrive as they were packed, in fewer bytes."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.reshard_strategies import Sides, sides
from weightsync.plan.direct.direct import Reads
from weightsync.plan.direct.packed_reads import PackedReads


@given(sides(), st.data())
def test_rows_of_reads_arrive_as_they_were(made: Sides, data: st.DataObject) -> None:
    reads = made.reshard().reads(0, [1] * len(made.trainers))
    rows = np.array(data.draw(st.lists(st.integers(0, len(reads) - 1))) if len(reads) else [], np.int64)
    packed = pickle.loads(pickle.dumps(PackedReads.of([(reads, rows), (reads, rows[:1])])))
    wanted = reads.take(np.concatenate([rows, rows[:1]]))
    found = packed.reads(reads.src_names)
    for field in fields(Reads):
        ours, theirs = getattr(found, field.name), getattr(wanted, field.name)
        assert np.array_equal(ours, theirs)
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


@given(sides())
def test_a_sender_is_not_told_where_its_bytes_go(made: Sides) -> None:
    reads = made.reshard().reads(0, [1] * len(made.trainers))
    found = PackedReads.of([(reads, np.arange(len(reads)))], to_send=True).reads(reads.src_names)
    assert not found.dst.any()
    assert not found.dst_buffer.any()
    assert found.dst_names == ()
    assert np.array_equal(found.table()[:, [0, 2, 3, 4, 5]], reads.table()[:, [0, 2, 3, 4, 5]])


def test_columns_are_narrow() -> None:
    numbers = np.arange(1000)
    table = np.column_stack([numbers * 8, numbers * 4096, *[np.full(1000, n) for n in (1, 4096, 4096, 4096)]])
    reads = Reads.from_table(numbers % 200, ("w",), numbers * 0, ("w",), numbers * 0, table)
    packed = PackedReads.of([(reads, numbers)])
    assert sum(column.nbytes for column in packed.columns.values()) < 9000  # of 60,000
