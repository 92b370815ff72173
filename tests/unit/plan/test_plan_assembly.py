"""Tensors that are incomplete at the same time never share memory."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.broadcast.assembly import assemble


def plan_of(sizes: list[int], bucket_bytes: int) -> Plan:
    metas = tuple(TensorMeta(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes))
    layout = Layout.from_ranks([RankLayout(metas, tuple(map(Segment.whole, metas)))])
    members = Members(num_holders=2, trainers=(0,), engines=(("e", (1,)),))
    return make_plan(
        layout,
        {"e": layout},
        members,
        bucket_bytes=bucket_bytes,
        max_staging_bytes=2 * bucket_bytes,
        slots=2,
        epoch=1,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=30).filter(any))
    return plan_of(sizes, draw(st.integers(256, 2000)))


@given(plans(), st.sets(st.integers(0, 29)))
def test_places_do_not_overlap_from_a_tensors_first_bucket_to_its_last(plan: Plan, only: set[int]) -> None:
    found = assemble(plan, only)
    buckets: dict[int, list[int]] = {}
    for bucket in plan.buckets():
        for piece in (each for each in bucket.pieces if each.tensor in only):
            buckets.setdefault(piece.tensor, []).append(bucket.index)
    assert len(found.complete) == plan.num_buckets
    for index, complete in enumerate(found.complete):
        assert sorted(complete) == sorted(t for t, its in buckets.items() if its[-1] == index)
        alive = sorted(
            (found.offset[t], found.offset[t] + plan.tensors[t].nbytes)
            for t, its in buckets.items()
            if its[0] <= index <= its[-1]
        )
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(alive))
        assert all(end <= found.nbytes for _, end in alive)
    # What follows in the same memory has to be aligned, too.
    assert all(offset % 256 == 0 for offset in (*found.offset, found.nbytes))


def test_memory_is_used_again() -> None:
    plan = plan_of([256] * 100, 512)
    assert plan.num_buckets == 50
    assert assemble(plan, range(100)).nbytes == 512
    assert assemble(plan_of([256, 5000, 256], 512), range(3)).nbytes <= 5000 + 1024
