"""DeepEP's own checks of its Buffer, restated, hold for ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.expert_ranks import Tokens, in_threads, make_tokens, movers
from weightsync.errors import ConfigError
from weightsync.experts.deep_ep import Buffer, EventOverlap
from weightsync.experts.fp8 import Fp8Rows, quantised

NUM_RANKS, NUM_EXPERTS, HIDDEN, ALIGNMENT = 4, 12, 256, 8


@pytest.fixture(scope="module", params=["shared memory", "messages"])
def buffers(request: pytest.FixtureRequest) -> Iterator[list[Buffer]]:
    with movers(request.param, NUM_RANKS) as ends:
        yield [Buffer(end, num_nvl_bytes=1 << 20) for end in ends]


TOKENS = make_tokens([9, 0, 17, 5], NUM_EXPERTS, 4, HIDDEN, empty=0.2, skew=0.3)


def layouts(buffers: Sequence[Buffer], tokens: Tokens) -> list[Any]:
    return in_threads(lambda buffer, ids: buffer.get_dispatch_layout(ids, NUM_EXPERTS), buffers, tokens.ids)


def dispatch(buffers: Sequence[Buffer], x: Sequence[Any], **settings: Any) -> list[Any]:
    def call(buffer: Buffer, x: Any, layout: Any, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        per_rank, per_node, per_expert, needed, _ = layout
        return buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=needed,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=ALIGNMENT,
            config=Buffer.get_dispatch_config(NUM_RANKS),
            async_finish=True,
            **settings,
        )

    return in_threads(call, buffers, x, layouts(buffers, TOKENS), TOKENS.ids, TOKENS.weights)


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    if not x.numel():
        return 0.0
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def ranks_per_token(ids: torch.Tensor) -> torch.Tensor:
    """By a loop."""
    per_rank = NUM_EXPERTS // NUM_RANKS
    return torch.tensor([len({each // per_rank for each in row if each >= 0}) for row in ids.tolist()])


def test_the_layout_is_a_recount(buffers: list[Buffer]) -> None:
    num_local = NUM_EXPERTS // NUM_RANKS
    for ids, (per_rank, per_node, per_expert, needed, event) in zip(
        TOKENS.ids, layouts(buffers, TOKENS), strict=True
    ):
        flat = ids.flatten().tolist()
        assert per_expert.tolist() == [flat.count(expert) for expert in range(NUM_EXPERTS)]
        recount = [
            [any(each // num_local == r for each in row if each >= 0) for r in range(NUM_RANKS)]
            for row in ids.tolist()
        ]
        assert needed.tolist() == recount
        assert per_rank.tolist() == needed.sum(0).tolist()
        assert per_rank.dtype == per_expert.dtype == torch.int32
        assert per_node is None
        event.current_stream_wait()


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_come_in_blocks_of_source_ranks(buffers: list[Buffer], fp8: bool) -> None:
    x: list[Any] = [torch.full_like(each, rank + 1) for rank, each in enumerate(TOKENS.x)]
    if fp8:
        x = [tuple(Fp8Rows.split(quantised(each), HIDDEN)) for each in x]
    num_needed = torch.stack([layout[0] for layout in layouts(buffers, TOKENS)])
    num_chosen = sum(layout[2] for layout in layouts(buffers, TOKENS)).view(NUM_RANKS, -1)
    for rank, (rows, ids, weights, per_expert, handle, _) in enumerate(dispatch(buffers, x)):
        rows = Fp8Rows(*rows).dequantised() if fp8 else rows
        assert len(rows) == len(ids) == len(weights) == int(num_needed[:, rank].sum())
        assert per_expert == [-(-num // ALIGNMENT) * ALIGNMENT for num in num_chosen[rank].tolist()]
        assert torch.equal(handle[0][:, rank], num_needed[:, rank].cumsum(0))
        blocks = torch.arange(1, NUM_RANKS + 1).repeat_interleave(num_needed[:, rank])
        assert torch.allclose(rows.float(), blocks[:, None].expand_as(rows).float(), rtol=1e-6)


def test_experts_and_weights_are_those_of_the_source(buffers: list[Buffer]) -> None:
    num_local = NUM_EXPERTS // NUM_RANKS
    for rank, (rows, ids, weights, per_expert, handle, _) in enumerate(dispatch(buffers, TOKENS.x)):
        assert len(handle) == 6
        assert set(ids.unique().tolist()) <= {-1, *range(num_local)}
        counts = [int((ids == expert).sum()) for expert in range(num_local)]
        assert [-(-num // ALIGNMENT) * ALIGNMENT for num in counts] == per_expert
        starts = torch.nn.functional.pad(handle[0][:, rank], (1, 0)).tolist()
        for source in range(NUM_RANKS):
            block = slice(starts[source], starts[source + 1])
            tokens = handle[3][block].long()
            assert torch.equal(rows[block], TOKENS.x[source][tokens])
            theirs = TOKENS.ids[source][tokens] - rank * num_local
            is_mine = (theirs >= 0) & (theirs < num_local)
            assert torch.equal(ids[block], torch.where(is_mine, theirs, -1))
            assert torch.equal(weights[block], torch.where(is_mine, TOKENS.weights[source][tokens], 0))


def test_worst_case_tensors_begin_alike(buffers: list[Buffer]) -> None:
    num_worst = NUM_RANKS * 17
    normal, worst = dispatch(buffers, TOKENS.x), dispatch(buffers, TOKENS.x, num_worst_tokens=num_worst)
    for (rows, ids, weights, *_), (more, more_ids, more_weights, per_expert, _, _) in zip(
        normal, worst, strict=True
    ):
        num = len(rows)
        assert len(more) == len(more_ids) == len(more_weights) == num_worst
        assert per_expert == []
        for short, long in ((rows, more), (ids, more_ids), (weights, more_weights)):
            assert torch.equal(short, long[:num])
        assert bool((more_ids[num:] == -1).all())
    with pytest.raises(ConfigError, match=r"num_worst_tokens: 1 is not valid; give \d+ or more"):
        dispatch(buffers, TOKENS.x, num_worst_tokens=1)


def test_a_handle_brings_the_same_rows_again(buffers: list[Buffer]) -> None:
    first = dispatch(buffers, TOKENS.x)
    handles = [each[4] for each in first]
    again = in_threads(
        lambda buffer, x, handle: buffer.dispatch(x, handle=handle), buffers, TOKENS.x, handles
    )
    for (rows, *_), (same, *nothing, event) in zip(first, again, strict=True):
        assert torch.equal(rows, same)
        assert nothing == [None] * 4
        assert isinstance(event, EventOverlap)


@pytest.mark.parametrize("num_biases", [0, 1, 2])
@pytest.mark.parametrize("num_worst", [0, 70])
def test_what_is_combined_is_a_multiple_of_the_tokens(
    buffers: list[Buffer], num_biases: int, num_worst: int
) -> None:
    found = dispatch(buffers, TOKENS.x, num_worst_tokens=num_worst)
    biases = [(torch.ones_like(each), torch.full_like(each, 2))[:num_biases] or None for each in TOKENS.x]

    def combine(buffer: Buffer, given: Any, bias: Any) -> Any:
        return buffer.combine(given[0], given[4], topk_weights=given[2], bias=bias)

    for rank, (out, weights, _) in enumerate(in_threads(combine, buffers, found, biases)):
        times = ranks_per_token(TOKENS.ids[rank])[:, None]
        bias = (0, 1, 3)[num_biases]
        assert out.dtype == torch.bfloat16
        assert difference(
            (out.float() - bias) / times.clamp(min=1), torch.where(times > 0, TOKENS.x[rank], 0)
        ) < (5e-6 if not bias else 1e-4)
        expected = torch.where(TOKENS.ids[rank] >= 0, TOKENS.weights[rank], 0)
        assert difference(weights, expected) < 1e-9


def test_low_latency_mode_and_a_missing_layout_are_refused(buffers: list[Buffer]) -> None:
    with pytest.raises(ConfigError, match="low_latency_mode: True is not valid; give False"):
        Buffer(None, low_latency_mode=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is_token_in_rank: None is not valid; give all results"):
        buffers[0].dispatch(TOKENS.x[0])
    with pytest.raises(ConfigError, match="num_experts: 10 is not valid; give a multiple"):
        buffers[0].get_dispatch_layout(TOKENS.ids[0], 10)
