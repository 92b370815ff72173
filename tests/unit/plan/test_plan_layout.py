"""One side's declarations: joined, checked, and given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.unit.plan.plan_strategies import World, worlds
from weightsync.errors import PlanError
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta

W = TensorMeta("w", "bfloat16", (4, 6))
HALVES = tuple(Segment("w", Box((2 * i, 0), (2, 6)), "w", 0, (12, 2)) for i in range(2))
HEAD = Segment("head", Box((0, 0), (4, 6)), "w", 0, (12, 2))


def join(*ranks: RankLayout) -> Layout:
    return Layout.from_ranks(ranks)


@given(worlds())
def test_each_rank_gets_its_segments_back(world: World) -> None:
    for layout, ranks in [(world.source(), world.trainers), (world.targets()["e0"], world.engines["e0"])]:
        assert layout.num_ranks == len(ranks)
        assert layout.tensors == tuple(world.tensors)
        for number, rank in enumerate(ranks):
            assert layout.segments(number) == tuple(rank.segments)


def test_ranks_may_know_different_tensors() -> None:
    """Pipeline stages do."""
    other = TensorMeta("other", "int8", ())
    layout = join(RankLayout((W,), HALVES), RankLayout((other,), ()))
    assert layout.tensors == (W, other)
    assert layout.segments(1) == ()


def test_columns_default_to_contiguous_buffers_named_after_their_tensors() -> None:
    rows = Layout.from_columns(
        tensors=(W,),
        num_ranks=2,
        tensor=np.array([0, 0], np.int32),
        rank=np.array([1, 0], np.int32),
        offset=np.array([[2, 0], [0, 0]]),
        extent=np.array([[2, 6], [2, 6]]),
    )
    assert [rows.segments(rank) for rank in range(2)] == [(HALVES[0],), (HALVES[1],)]


@pytest.mark.parametrize(
    ("ranks", "parameter", "says"),
    [
        (
            [RankLayout((W,), ()), RankLayout((TensorMeta("w", "float16", (4, 6)),), ())],
            "w",
            r"rank 0 says bfloat16 \(4, 6\), rank 1 says float16 \(4, 6\)",
        ),
        ([RankLayout((W,), (Segment("v", Box((0,), (1,)), "v", 0, (2,)),))], "v", "no rank declares it"),
        ([RankLayout((W,), (Segment("w", Box((0,), (1,)), "w", 0, (2,)),))], "w", "each needs 2 numbers"),
        ([RankLayout((W,), (Segment("w", Box((3, 0), (2, 6)), "w", 0, (12, 2)),))], "w", "reaches out of"),
        ([RankLayout((W,), (Segment("w", Box((-1, 0), (2, 6)), "w", 0, (12, 2)),))], "w", "reaches out of"),
        ([RankLayout((W,), (), tied=(("head", "ww"),))], "head", "did you mean 'w'"),
        (
            [RankLayout((W,), (), tied=(("head", "w"),)), RankLayout((W,), (), tied=(("head", "x"),))],
            "head",
            "tied to w and to x",
        ),
        ([RankLayout((W,), (), tied=(("head", "top"), ("top", "w")))], "head", "itself an alias"),
        ([RankLayout((W,), (HEAD,), tied=(("head", "w"),))], "head", "give them to w"),
        (
            [RankLayout((W, TensorMeta("head", "bfloat16", (4, 7))), (), tied=(("head", "w"),))],
            "head",
            r"shape \(4, 7\)",
        ),
        ([RankLayout((W,), (), buffers=(W, W))], "w", "declares this live parameter twice"),
        ([RankLayout((W,), (), buffers=(W,), padding=(("ww", 0, 1),))], "ww", "did you mean 'w'"),
    ],
)
def test_contradictions_name_the_parameter(ranks: list[RankLayout], parameter: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        Layout.from_ranks(ranks)
    assert caught.value.parameter == parameter


def test_an_alias_may_be_declared_as_a_tensor_too() -> None:
    head = TensorMeta("head", "bfloat16", (4, 6))
    layout = join(RankLayout((head, W), HALVES, tied=(("head", "w"),)))
    assert layout.tensors == (W,)
    assert layout.tied == (("head", "w"),)
