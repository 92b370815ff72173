"""Rows, tokens and gradients against a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.expert_ranks import MOVERS, Tokens, in_threads, make_tokens, movers, plain_rows
from weightsync.experts import ExpertGroup, Mover, Routing
from weightsync.experts.routes import Routes, worst_capacity


def groups_of(ends: Sequence[Mover], tokens: Tokens, **settings: Any) -> list[ExpertGroup]:
    x, ids = tokens.x[0], tokens.ids[0]
    usual: dict[str, Any] = {"num_experts": tokens.num_experts, "top_k": ids.shape[1], "dtype": x.dtype}
    usual |= {"hidden": x.shape[1], "max_tokens": tokens.max_tokens}
    return in_threads(lambda end: ExpertGroup(end, **usual | settings), ends)


def dispatched(groups: Sequence[ExpertGroup], tokens: Tokens) -> list[tuple[Any, torch.Tensor, Routing]]:
    return in_threads(ExpertGroup.dispatch, groups, tokens.x, tokens.ids, tokens.weights)


def expert_factors(counts: torch.Tensor, handle: Routing, first: int) -> torch.Tensor:
    """A factor of each row: an expert multiplies by 1 plus half of its number. Other rows are poisoned."""
    factors = torch.full((handle.capacity, 1), torch.nan)
    for local, (start, num) in enumerate(zip(handle.offsets.tolist(), counts.tolist(), strict=False)):
        factors[start : start + num] = 1 + (first + local) / 2
    return factors


@st.composite
def cases(draw: Callable[..., Any]) -> dict[str, Any]:
    num_ranks = draw(st.integers(1, 8))
    num_local = draw(st.integers(1, 4))
    return {
        "kind": draw(st.sampled_from(["local", "local", "shared memory", "messages"])),
        "num_tokens": draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks)),
        "num_experts": num_ranks * num_local,
        "top_k": draw(st.integers(1, min(8, num_ranks * num_local))),
        "hidden": draw(st.sampled_from([1, 3, 8])),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        "skew": draw(st.sampled_from([0.0, 1.0, 50.0])),
        "empty": draw(st.sampled_from([0.0, 0.2, 1.0])),
        "seed": draw(st.integers(0, 99)),
        "alignment": draw(st.sampled_from([1, 4, 16])),
        "part": draw(st.sampled_from([1.0, 1.0, 0.3])),
    }


@given(cases())
def test_rows_and_tokens_are_those_of_a_plain_loop(case: dict[str, Any]) -> None:
    kind, alignment, part = case.pop("kind"), case.pop("alignment"), case.pop("part")
    tokens = make_tokens(**case)
    num_ranks, top_k = len(tokens.x), case["top_k"]
    worst = worst_capacity(num_ranks, tokens.max_tokens, top_k, tokens.num_local, alignment)
    capacity = max(1, round(worst * part / alignment)) * alignment
    with movers(kind, num_ranks) as ends:
        groups = groups_of(ends, tokens, alignment=alignment, capacity=capacity, drops=True)
        found = dispatched(groups, tokens)
        expected = [torch.zeros(x.shape, dtype=torch.float64) for x in tokens.x]
        kept = [torch.zeros_like(ids, dtype=torch.bool) for ids in tokens.ids]
        results = []
        for owner, (rows, counts, handle) in enumerate(found):
            plain = plain_rows(tokens, owner, alignment, capacity)
            zero = torch.zeros_like(tokens.x[0][:0]).new_zeros(case["hidden"])
            wanted = torch.stack([zero if row is None else tokens.x[row.rank][row.token] for row in plain])
            assert torch.equal(rows, wanted)
            first = owner * tokens.num_local
            per_expert = [
                sum(row is not None and row.expert == first + e for row in plain) for e in range(len(counts))
            ]
            assert counts.tolist() == per_expert
            assert all(start % alignment == 0 for start in handle.offsets.tolist())
            results.append((rows * expert_factors(counts, handle, first)).to(rows.dtype))
            for number, row in enumerate(plain):
                if row is not None:
                    value = results[owner][number].double() * tokens.weights[row.rank][row.token, row.k]
                    expected[row.rank][row.token] += value
                    kept[row.rank][row.token, row.k] = True
        out = in_threads(ExpertGroup.combine, groups, results, [handle for *_, handle in found])
    tolerance = torch.finfo(case["dtype"]).eps * 16
    for rank, tokens_back in enumerate(out):
        assert tokens_back.dtype == case["dtype"]
        torch.testing.assert_close(tokens_back.double(), expected[rank], rtol=tolerance, atol=tolerance)
        assert torch.equal(found[rank][2].dropped, (tokens.ids[rank] >= 0) & ~kept[rank])


class AllRanks(torch.autograd.Function):
    """All ranks' calls as one function: threads forwards and backwards, since ranks wait for each other."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], num_ranks: int, *inputs: torch.Tensor) -> Any:
        ctx.inputs = [each.detach().requires_grad_() for each in inputs]
        per_rank = [ctx.inputs[rank::num_ranks] for rank in range(num_ranks)]

        def call(rank: int) -> torch.Tensor:
            with torch.enable_grad():
                found: torch.Tensor = run(rank, *per_rank[rank])
            return found

        ctx.num_ranks, ctx.outputs = num_ranks, in_threads(call, range(num_ranks))
        return tuple(each.detach() for each in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        def call(rank: int) -> Any:
            inputs = ctx.inputs[rank :: ctx.num_ranks]
            return torch.autograd.grad(ctx.outputs[rank], inputs, grads[rank], retain_graph=True)

        found = in_threads(call, range(ctx.num_ranks))
        return (
            None,
            None,
            *[found[rank][which] for which in range(len(found[0])) for rank in range(ctx.num_ranks)],
        )


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("part", [1.0, 0.4])
def test_gradients_are_those_of_differences(num_ranks: int, part: float) -> None:
    tokens = make_tokens([3, 2][:num_ranks], 4, 3, hidden=2, dtype=torch.float64)
    capacity = round(worst_capacity(num_ranks, tokens.max_tokens, 3, tokens.num_local, 2) * part / 2) * 2
    with movers("local", num_ranks) as ends:
        groups = groups_of(ends, tokens, alignment=2, capacity=capacity, drops=True)

        def run(rank: int, x: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            rows, _, handle = groups[rank].dispatch(x, tokens.ids[rank], weights)
            return groups[rank].combine(rows.sin() * scale, handle)

        scales = [torch.rand(capacity, 2, dtype=torch.float64) for _ in range(num_ranks)]
        inputs = [each.requires_grad_() for each in (*tokens.x, *tokens.weights, *scales)]
        assert torch.autograd.gradcheck(lambda *given: AllRanks.apply(run, num_ranks, *given), inputs)


@pytest.mark.parametrize("kind", MOVERS)
def test_a_rank_gets_a_token_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, sent = make_tokens([6, 5], 8, 6, empty=0.0), list[int]()
    with movers(kind, 2) as ends:
        exchange = type(ends[0]).exchange

        def counting(
            end: Mover, x: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor
        ) -> torch.Tensor:
            sent.append(int(sends.sum()))
            return exchange(end, x, sends, receives)

        groups = groups_of(ends, tokens)
        monkeypatch.setattr(type(ends[0]), "exchange", counting)
        dispatched(groups, tokens)
    assert sorted(sent) == [10, 12, 12, 12]  # tokens; and ids, which all ranks get, padded to 6 tokens


def test_the_planner_reads_no_value_back() -> None:
    routes = Routes.plan(torch.empty(4, 16, 3, dtype=torch.int64, device="meta"), 8, 4, 96)
    assert routes.row.shape == (4, 16, 3)
