"""Boxes of parameters that are composed and cut with NumPy, in random grids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ConfigError, PlanError
from weightsync.plan import Box
from weightsync.sources.megatron.cuts import Array, Cut, HeldBox, RankGroup, Sizes, parts

SMALL = st.integers(1, 4)
NONE = Sizes(vocab_size=1, num_heads=1, num_query_groups=1, head_dim=1)


def numbered(*shape: int, start: int = 0) -> np.ndarray:
    """An int32 tensor in which no two elements are equal."""
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def view(memory: np.ndarray, part: HeldBox) -> np.ndarray:
    """View a part as the library's segments are viewed: by bytes."""
    flat = np.ascontiguousarray(memory).reshape(-1)[part.start // 4 :]
    return np.lib.stride_tricks.as_strided(flat, part.box.extent, part.strides)


def check(
    cut: Cut, shards: Sequence[np.ndarray], sizes: Sizes, wanted: Sequence[Sequence[np.ndarray]]
) -> None:
    """Check that the ranks' boxes hold each element of ``wanted[expert][tensor]`` once."""
    found = [[np.full(tensor.shape, -1, np.int32) for tensor in expert] for expert in wanted]
    for rank, shard in enumerate(shards):
        array = Array("parameter", shard.shape, np.ascontiguousarray(shard).strides)
        for part in parts(cut, array, RankGroup(rank, len(shards)), sizes):
            target = found[part.expert][part.tensor]
            assert part.shape == target.shape
            assert (target[part.box.slices()] == -1).all()
            target[part.box.slices()] = view(shard, part)
    for expert, held in zip(wanted, found, strict=True):
        for tensor, each in zip(expert, held, strict=True):
            np.testing.assert_array_equal(each, tensor)


@given(SMALL, SMALL, st.sampled_from([(), (3,)]))
def test_rows(ranks: int, rows: int, rest: tuple[int, ...]) -> None:
    tensor = numbered(ranks * rows, *rest)
    check(Cut.ROWS, np.split(tensor, ranks), NONE, [[tensor]])


@given(SMALL, SMALL, SMALL)
def test_columns(ranks: int, rows: int, columns: int) -> None:
    tensor = numbered(rows, ranks * columns)
    check(Cut.COLUMNS, np.split(tensor, ranks, axis=1), NONE, [[tensor]])


@given(SMALL, st.integers(1, 40), st.integers(1, 8))
def test_a_vocabulary_without_its_padding(ranks: int, vocab_size: int, divisor: int) -> None:
    tensor = numbered(vocab_size, 3)
    padding = -(-vocab_size // (divisor * ranks)) * divisor * ranks - vocab_size
    padded = np.concatenate([tensor, np.full((padding, 3), -7, np.int32)])
    sizes = Sizes(vocab_size=vocab_size, num_heads=1, num_query_groups=1, head_dim=1)
    check(Cut.VOCABULARY, np.split(padded, ranks), sizes, [[tensor]])


@given(SMALL, SMALL, st.sampled_from([(), (3,)]))
def test_gate_and_up(ranks: int, rows: int, rest: tuple[int, ...]) -> None:
    gate = numbered(ranks * rows, *rest)
    up = numbered(ranks * rows, *rest, start=gate.size)
    shards = [np.concatenate(pair) for pair in zip(np.split(gate, ranks), np.split(up, ranks), strict=True)]
    check(Cut.GATED, shards, NONE, [[gate, up]])


@given(SMALL, SMALL, SMALL, st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([(), (3,)]))
def test_heads_by_query_group_also_if_ranks_split_a_group(
    groups: int, queries: int, head_dim: int, ranks: int, rest: tuple[int, ...]
) -> None:
    head_dim *= ranks  # so that the rows can be cut evenly
    q = numbered(groups, queries * head_dim, *rest)
    k = numbered(groups, head_dim, *rest, start=q.size)
    v = numbered(groups, head_dim, *rest, start=q.size + k.size)
    fused = np.concatenate([q, k, v], axis=1).reshape(-1, *rest)
    sizes = Sizes(vocab_size=1, num_heads=groups * queries, num_query_groups=groups, head_dim=head_dim)
    check(Cut.QKV, np.split(fused, ranks), sizes, [[each.reshape(-1, *rest) for each in (q, k, v)]])


@given(SMALL, SMALL, st.booleans())
def test_latent_rows_are_cut_or_whole(ranks: int, rows: int, is_cut: bool) -> None:
    tensor = numbered(ranks * rows, 3)
    sizes = Sizes(
        vocab_size=1,
        num_heads=1,
        num_query_groups=1,
        head_dim=1,
        q_latent=ranks * rows,
        kv_latent=ranks * rows,
    )
    for cut in (Cut.Q_LATENT, Cut.KV_LATENT):
        if is_cut:
            check(cut, np.split(tensor, ranks), sizes, [[tensor]])
        else:
            (part,) = parts(cut, Array("p", tensor.shape, tensor.strides), RankGroup(ranks - 1, ranks), sizes)
            assert part == HeldBox(0, tensor.shape, Box.whole(tensor.shape), 0, tensor.strides)


@given(SMALL, SMALL, SMALL, SMALL, st.booleans())
def test_stacked_experts_are_input_major(
    experts: int, ranks: int, outputs: int, inputs: int, is_gated: bool
) -> None:
    shape = (experts, 1 + is_gated, ranks * outputs, inputs)
    first = numbered(*shape)
    sizes = Sizes(vocab_size=1, num_heads=1, num_query_groups=1, head_dim=1, num_local_experts=experts)
    shards = [
        np.stack([np.concatenate([*each]).T for each in piece]).reshape(inputs, -1)
        for piece in np.split(first, ranks, axis=2)
    ]
    check(Cut.STACKED_GATED if is_gated else Cut.STACKED_ROWS, shards, sizes, first)
    second = numbered(experts, inputs, ranks * outputs)
    shards = [
        np.stack([each.T for each in piece]).reshape(-1, inputs) for piece in np.split(second, ranks, axis=2)
    ]
    check(Cut.STACKED_COLUMNS, shards, sizes, [[each] for each in second])


def test_a_padded_vocabulary_smaller_than_the_checkpoints_is_refused() -> None:
    sizes = Sizes(vocab_size=17, num_heads=1, num_query_groups=1, head_dim=1)
    with pytest.raises(ConfigError, match=r"vocab_size: 17 .* p has 16 rows over 2 ranks"):
        parts(Cut.VOCABULARY, Array("p", (8, 3), (12, 4)), RankGroup(0, 2), sizes)


def test_a_rank_of_padding_alone_declares_nothing() -> None:
    sizes = Sizes(vocab_size=8, num_heads=1, num_query_groups=1, head_dim=1)
    assert parts(Cut.VOCABULARY, Array("p", (8, 3), (12, 4)), RankGroup(1, 2), sizes) == ()


@pytest.mark.parametrize(
    ("cut", "array", "problem"),
    [
        (Cut.QKV, Array("p", (8, 3), (12, 4)), "the model has 1 query groups of 1 \\+ 2 heads of 1"),
        (Cut.GATED, Array("p", (7, 3), (12, 4)), "gate and up have as many rows"),
        (Cut.COLUMNS, Array("p", (7,), (4,)), "two dimensions"),
        (Cut.Q_LATENT, Array("p", (7, 3), (12, 4)), "the model has 0"),
        (Cut.STACKED_GATED, Array("p", (3, 8), (4, 12)), "not contiguous"),
        (Cut.STACKED_COLUMNS, Array("p", (3, 8), (32, 4)), "not a stack of 0"),
    ],
)
def test_a_shape_that_does_not_fit_the_model_is_refused(cut: Cut, array: Array, problem: str) -> None:
    with pytest.raises(PlanError, match=f"^p: .*{problem}"):
        parts(cut, array, RankGroup(0, 2), NONE)
