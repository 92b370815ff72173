"""Buckets of large tensors, and the figures of a plan."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_plan import engine_layout, growth_exponent, members, plan, tensors, trainer_layout
from tests.unit.plan.plan_strategies import World, worlds
from weightsync.plan import Box, Cluster, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.text import count_text, rate_text, size_text


def rows_plan(
    shape: tuple[int, int], num_trainers: int, bucket_bytes: int, receivers: tuple[int, ...]
) -> Plan:
    """One int8 tensor in row blocks; trainer i on holder i."""
    meta = TensorMeta("w", "int8", shape)
    rows = shape[0] // num_trainers
    source = Layout.from_ranks(
        [
            RankLayout((meta,), (Segment("w", Box((rows * i, 0), (rows, shape[1])), "w", 0, (shape[1], 1)),))
            for i in range(num_trainers)
        ]
    )
    engine = Layout.from_ranks([RankLayout((meta,), ())] * len(receivers))
    fleet = Members(1 + max(num_trainers - 1, *receivers), tuple(range(num_trainers)), (("e", receivers),))
    return make_plan(source, {"e": engine}, fleet, bucket_bytes=bucket_bytes, max_staging_bytes=1 << 30)


def test_every_trainer_has_a_share_of_each_bucket_of_a_large_tensor() -> None:
    made = rows_plan((64, 256), 4, 4096, (0,))
    assert made.num_buckets == 4
    for bucket in made.buckets():
        assert [(step.root, step.nbytes) for step in bucket.steps] == [(i, 1024) for i in range(4)]


@pytest.mark.parametrize("bucket_bytes", [256, 1000, 1 << 12, 1 << 16])
def test_small_buckets_stay_full(bucket_bytes: int) -> None:
    made = rows_plan((512, 64), 2, bucket_bytes, (0,))
    full = bucket_bytes // 256 * 256
    assert [b.nbytes for b in made.buckets()][:-1] == [full] * (made.num_buckets - 1)


def test_whole_tensors_stay_together_when_they_fit() -> None:
    metas = [TensorMeta(f"t{i}", "int8", (size,)) for i, size in enumerate((200, 300, 500, 100, 900, 10))]
    layout = Layout.from_ranks(
        [RankLayout(tuple(metas), tuple(Segment(m.name, Box((0,), m.shape), m.name, 0, (1,)) for m in metas))]
    )
    fleet = Members(1, (0,), (("e", (0,)),))
    made = make_plan(layout, {"e": layout}, fleet, bucket_bytes=1024, max_staging_bytes=1 << 20)
    assert [[p.tensor for p in b.pieces] for b in made.buckets()] == [[0, 1], [2, 3], [4], [5]]


def test_figures_of_a_disaggregated_plan() -> None:
    made = rows_plan((1024, 1024), 2, 1 << 18, (2, 3))
    shown = made.explain(Cluster("two racks", link_gb_per_s=1.0, host_gb_per_s=0.5))
    half, whole = 1 << 19, 1 << 20
    assert shown.sent == {0: half, 1: half}
    assert shown.received == {2: whole, 3: whole}
    assert shown.edges == {(s, r): half for s in (0, 1) for r in (2, 3)}
    assert shown.staging == {0: 0, 1: 0, 2: 1 << 19, 3: 1 << 19}
    assert shown.send_buffer == {0: half, 1: half, 2: 0, 3: 0}
    assert shown.imbalance == 1.0
    assert shown.floor_seconds == pytest.approx(whole / 1e9)
    assert shown.stage_seconds == pytest.approx({"broadcast": whole / 1e9, "host to device": half / 0.5e9})
    assert "floor 1.0 ms" in str(shown)
    assert "two racks" in str(shown)


def test_a_colocated_holder_does_not_receive_what_it_sends() -> None:
    shown = rows_plan((1024, 1024), 2, 1 << 18, (0, 1)).explain()
    assert shown.received == {0: 1 << 19, 1: 1 << 19}
    assert set(shown.edges) == {(0, 1), (1, 0)}
    assert shown.floor_seconds is None
    assert "1.05 MB" in str(shown)


@given(worlds(), st.sampled_from([256, 2048]))
def test_figures_add_up(world: World, bucket_bytes: int) -> None:
    made = world.plan(bucket_bytes)
    shown = made.explain(Cluster("any", 1.0))
    total = sum(step.nbytes for step in made.steps)
    assert sum(shown.sent.values()) == total >= shown.payload_nbytes == made.total_nbytes
    for holder, nbytes in shown.received.items():
        assert nbytes == sum(n for (_, receiver), n in shown.edges.items() if receiver == holder)
        assert nbytes == total - shown.sent.get(holder, 0)
    assert sum(shown.send_buffer.values()) == sum(b.nbytes for b in made.buckets())
    largest = max(b.nbytes for b in made.buckets())
    receivers = made.members.receivers
    assert shown.staging == {h: 2 * largest * (h in receivers) for h in range(made.members.num_holders)}
    assert shown.imbalance >= 1


def planning(count: int) -> tuple[float, Plan]:
    """This thread's CPU seconds to plan `count` tensors: what else runs does not count."""
    source, fleet = trainer_layout(tensors(count)), members()
    engines = dict.fromkeys((name for name, _ in fleet.engines), engine_layout(tensors(count)))
    start = time.thread_time()
    made = plan(source, engines, fleet)
    return time.thread_time() - start, made


def test_planning_grows_linearly() -> None:
    sizes = [500, 2_000, 8_000]
    seconds = [min(planning(count)[0] for _ in range(3)) for count in sizes]
    assert growth_exponent(sizes, seconds) < 1.5  # a quadratic step would give nearly 2


def test_a_large_model_is_planned_in_seconds_and_travels_light() -> None:
    seconds, made = planning(20_000)
    assert seconds < 5  # takes 0.3 s on a quick core
    num_dense = sum(meta.dtype == "bfloat16" for meta in made.tensors)
    assert made.num_pieces == 8 * (20_000 - num_dense) + 128 * num_dense
    assert len(pickle.dumps(made)) < 50 * made.num_pieces
    assert made.explain().imbalance < 1.05
    assert (np.diff(made.bucket_step) > 0).all()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1_254_000, "1.25 MB"),
        (61_064_245_248, "61.1 GB"),
        (1_311_980_000_000, "1.31 TB"),
        (5 << 60, "5.76 EB"),
        (10**22, "1e+04 EB"),
    ],
)
def test_sizes_have_three_digits_and_one_family_of_units(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
    assert rate_text(nbytes / 1e9) == f"{text}/s"


def test_counts_are_said_in_words() -> None:
    assert [count_text(n, "copy") for n in (0, 1, 2)] == ["0 copies", "1 copy", "2 copies"]
    assert [count_text(n, "engine") for n in (0, 1, 2)] == ["0 engines", "1 engine", "2 engines"]
    assert str(rows_plan((64, 64), 1, 1 << 16, (0,)).explain()).splitlines()[:3] == [
        "1 tensor, 4.1 kB, in 1 piece, 1 bucket, 1 broadcast",
        "1 root sends up to 4.1 kB each (imbalance 1.00)",
        "1 holder receives up to 0 B",
    ]
