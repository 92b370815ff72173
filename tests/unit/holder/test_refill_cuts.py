"""A portion of a refill, cut for several peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightsync.holder.refill import LEAST_CUT_NBYTES, cut_portion
from weightsync.plan.broadcast.plan import Portion


@given(
    nbytes=st.integers(0, 20 * LEAST_CUT_NBYTES),
    num_cuts=st.integers(1, 9),
    source=st.integers(0, 1 << 40),
    offset=st.integers(0, 1 << 30),
)
def test_cuts_are_the_portion_in_order(nbytes: int, num_cuts: int, source: int, offset: int) -> None:
    cuts = cut_portion(Portion(3, source, offset, nbytes), num_cuts)
    assert len(cuts) <= num_cuts
    at = 0
    for cut in cuts:
        assert (cut.part, cut.source, cut.offset) == (3, source + at, offset + at)
        at += cut.nbytes
    assert at == nbytes
    assert all(cut.nbytes >= LEAST_CUT_NBYTES for cut in cuts[:-1])


def test_large_portions_are_shared_equally() -> None:
    cuts = cut_portion(Portion(0, 0, 0, 3 << 20), 3)
    assert [cut.nbytes for cut in cuts] == [1 << 20] * 3
