"""Rows, tokens and gradients against a plain loop."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.expert_ranks import MOVERS, Tokens, in_threads, make_tokens, movers, plain_rows
from weightsync.errors import ConfigError
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

        scales = [torch.rand(2, dtype=torch.float64) for _ in range(num_ranks)]
        inputs = [each.requires_grad_() for each in (*tokens.x, *tokens.weights, *scales)]
        assert torch.autograd.gradcheck(lambda *given: AllRanks.apply(run, num_ranks, *given), inputs)


@pytest.mark.parametrize("kind", ["local", "shared memory", "messages"])
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


def test_plans_copies_and_sums_read_no_value_back() -> None:
    """Tensors of this device have no values."""
    ids, rows = torch.empty(4, 16, 3, dtype=torch.int64, device="meta"), torch.empty(96, 8, device="meta")
    routing = Routing(1, 96, Routes.plan(ids, 8, 4, 96), ids.float(), ids.float()[1])
    assert routing.placed(torch.empty(4, 16, 8, device="meta")).shape == rows.shape
    assert routing.partial_sums(rows, routing.weights).shape == (4, 16, 8)
    assert routing.dropped.shape == (16, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_bitwise_those_of_two_index_selects_and_an_all_to_all(dtype: torch.dtype) -> None:
    """The chain that others use: copies by expert, messages, then a sort by expert at the receiver."""
    tokens = make_tokens([70, 31, 64], 12, 4, 130, dtype)
    with movers("messages", 3) as ends:
        rows = [each[0] for each in dispatched(groups_of(ends, tokens), tokens)]
    flat = [ids.flatten() for ids in tokens.ids]
    order = [each.argsort(stable=True) for each in flat]
    sorted_ids = [each[at] for each, at in zip(flat, order, strict=True)]
    packed = [x.index_select(0, at // 4) for x, at in zip(tokens.x, order, strict=True)]
    for rank, found in enumerate(rows):
        mine = [(ids >= 4 * rank) & (ids < 4 * rank + 4) for ids in sorted_ids]
        received = torch.cat([each[here] for each, here in zip(packed, mine, strict=True)])
        experts = torch.cat([ids[here] for ids, here in zip(sorted_ids, mine, strict=True)])
        expected = received.index_select(0, experts.argsort(stable=True))
        assert torch.equal(found[: len(expected)].view(torch.uint8), expected.view(torch.uint8))
        assert not found[len(expected) :].any()


def test_a_copy_with_weight_one_is_bitwise_the_token() -> None:
    tokens = make_tokens([20, 30], 8, 1, 24, empty=0.0)
    for each in tokens.weights:
        each.fill_(1)
    with movers("shared memory", 2) as ends:
        groups = groups_of(ends, tokens)
        rows, _, handles = zip(*dispatched(groups, tokens), strict=True)
        assert all(map(torch.equal, in_threads(ExpertGroup.combine, groups, rows, handles), tokens.x))


@pytest.mark.parametrize("hidden", [1, 128, 200])
def test_fp8_rows_have_a_scale_for_each_128_values(hidden: int) -> None:
    tokens = make_tokens([7, 0, 5], 6, 3, hidden)
    tokens.x[0][0] *= 1000
    tokens.x[2][0] = 0
    with movers("shared memory", 3) as ends:
        plain = [rows for rows, *_ in dispatched(groups_of(ends, tokens), tokens)]
        groups = groups_of(ends, tokens, fp8=True)
        found = dispatched(groups, tokens)
        back = in_threads(ExpertGroup.combine, groups, plain, [handle for *_, handle in found])
    for rows, (fp8, _, _) in zip(plain, found, strict=True):
        assert fp8.values.dtype == torch.float8_e4m3fn
        assert fp8.scales.shape == (len(rows), -(-hidden // 128))
        blocks = torch.nn.functional.pad(rows.float(), (0, -hidden % 128)).unflatten(1, (-1, 128))
        largest = blocks.abs().amax(2)
        used = largest[:, 0] > 0
        assert torch.allclose(fp8.scales[used], largest[used].clamp(min=1e-4) / 448)
        error = (fp8.dequantised() - rows.float()).abs()
        assert bool((error <= rows.float().abs() / 16 + largest.amax(1, keepdim=True) * 2**-9).all())
    assert all(each.dtype == torch.bfloat16 for each in back)
    with pytest.raises(ConfigError, match=r"x: 'requires_grad' is not valid; FP8 rows have no gradients"):
        groups[0].dispatch(tokens.x[0].requires_grad_(), tokens.ids[0], tokens.weights[0])


def test_rows_without_a_token_bring_nothing_into_gradients() -> None:
    tokens = make_tokens([6, 3], 4, 2, dtype=torch.float32)
    with movers("local", 2) as ends:
        groups = groups_of(ends, tokens, alignment=4)

        def call(group: ExpertGroup, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
            x.requires_grad_()
            weights.requires_grad_()
            rows, counts, handle = group.dispatch(x, ids, weights)
            poison = expert_factors(counts, handle, 0)  # NaN in rows without a token
            group.combine(rows * poison, handle).sum().backward()

        in_threads(call, groups, tokens.x, tokens.ids, tokens.weights)
    for each in (*tokens.x, *tokens.weights):
        assert each.grad is not None
        assert bool(each.grad.isfinite().all())
        assert each.grad.any()


def steps_of(num_steps: int, kind: str) -> None:
    """Other tokens in every step, and pauses of random length before and between the calls of each rank."""
    pauses = [random.Random(rank) for rank in range(3)]
    steps = [
        make_tokens([5, 0, 8][::direction], 6, 3, 4, seed=seed)
        for seed, direction in enumerate((1, -1, 1, -1))
    ]
    expected = [
        [
            (x.float() * torch.where(ids >= 0, w, 0).sum(1, keepdim=True))
            for x, ids, w in zip(t.x, t.ids, t.weights, strict=True)
        ]
        for t in steps
    ]
    with movers(kind, 3) as ends:
        groups = groups_of(ends, steps[0])

        def run(rank: int) -> None:
            for number in range(num_steps):
                tokens, wanted = steps[number % len(steps)], expected[number % len(steps)]
                time.sleep(pauses[rank].choice([0, 0, 1e-4, 2e-3]))
                rows, _, handle = groups[rank].dispatch(
                    tokens.x[rank], tokens.ids[rank], tokens.weights[rank]
                )
                time.sleep(pauses[rank].choice([0, 0, 1e-4, 2e-3]))
                tokens_back = groups[rank].combine(rows, handle)
                torch.testing.assert_close(tokens_back.float(), wanted[rank], rtol=0.02, atol=0.02)

        in_threads(run, range(3))


@pytest.mark.parametrize(
    ("num_steps", "kind"),
    [
        (30, "local"),
        (60, "shared memory"),
        *(pytest.param(1000, kind, marks=pytest.mark.faults) for kind in MOVERS),
    ],
)
def test_ranks_that_pause_get_the_rows_of_the_step(num_steps: int, kind: str) -> None:
    steps_of(num_steps, kind)


SETTINGS = {"num_experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 6}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"num_experts": 5},
            "num_experts: 5 is not valid; give a multiple of the number of ranks, 2, such as 4",
        ),
        ({"top_k": 9}, "top_k: 9 is not valid; give num_experts, 4, or less"),
        ({"capacity": -4}, "capacity: -4 is not valid; give a multiple of alignment, 1, such as 1"),
        ({"hidden": 0}, "hidden: 0 is not valid; give 1 or more"),
        ({"dtype": torch.int8}, "dtype: torch.int8 is not valid; give one of torch.bfloat16"),
        (
            {"capacity": 10, "alignment": 4},
            "capacity: 10 is not valid; give a multiple of alignment, 4, such as 8",
        ),
        (
            {"capacity": 8, "check": False},
            "check: False is not valid; give True, drops=True, or a capacity of 24",
        ),
    ],
)
def test_settings_that_are_not_valid_are_refused(settings: dict[str, Any], problem: str) -> None:
    with movers("local", 2) as ends, pytest.raises(ConfigError, match=re.escape(problem)):
        ExpertGroup(ends[0], **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"hidden": 8}, "hidden: 8 is not valid; rank 0 has 4: give all ranks the same"),
        ({"dtype": torch.float32}, "dtype: torch.float32 is not valid; rank 0 has torch.bfloat16: give"),
        ({"drops": True}, "drops: True is not valid; rank 0 has 0: give"),
    ],
)
def test_ranks_that_disagree_are_all_refused(settings: dict[str, Any], problem: str) -> None:
    def make(end: Mover) -> str:
        with pytest.raises(ConfigError) as caught:
            ExpertGroup(end, **{**SETTINGS, **(settings if end.rank else {})})
        return str(caught.value)

    with movers("local", 2) as ends:
        mine, theirs = in_threads(make, ends)
    assert theirs.startswith(problem)
    assert mine.startswith(next(iter(settings)))


def refused(tokens: Tokens, **settings: Any) -> set[str]:
    """What all ranks say, each of them at once."""
    with movers("local", 2) as ends:
        groups = groups_of(ends, tokens, **settings)

        def call(group: ExpertGroup, *given: torch.Tensor) -> str:
            with pytest.raises(ConfigError) as caught:
                group.dispatch(*given)
            return str(caught.value)

        return {*in_threads(call, groups, tokens.x, tokens.ids, tokens.weights)}


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([3, 8], "topk_ids: 8 is not valid; rank 1, token 2: give 0 to 7, or -1 for no expert"),
        ([-2, 0], "topk_ids: -2 is not valid; rank 1, token 2: give 0 to 7, or -1 for no expert"),
        ([5, 5], "topk_ids: 5 is not valid; rank 1, token 2: give an expert once per token"),
    ],
)
def test_every_rank_names_the_token_whose_experts_are_wrong(ids: list[int], problem: str) -> None:
    tokens = make_tokens([2, 4], 8, 2, empty=0.0)
    tokens.ids[1][2] = torch.tensor(ids)
    assert refused(tokens) == {problem}


def test_a_capacity_that_is_too_small_is_refused_by_every_rank() -> None:
    tokens = make_tokens([6, 6], 4, 1, empty=0.0)
    for each in tokens.ids:
        each.fill_(2)
    assert refused(tokens, capacity=8, alignment=4) == {
        "capacity: 8 is not valid; rank 1 needs 12 rows: give 12 or more, or drops=True"
    }


def test_without_checks_wrong_ids_count_as_no_expert() -> None:
    tokens = make_tokens([4, 4], 8, 2, empty=0.0)
    tokens.ids[0][1] = torch.tensor([8, -5])
    with movers("local", 2) as ends:
        groups = groups_of(ends, tokens, check=False)
        rows, _, handles = zip(*dispatched(groups, tokens), strict=True)
        back, _ = in_threads(ExpertGroup.combine, groups, rows, handles)
    assert not back[1].any()
    assert not handles[0].dropped.any()


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("x", lambda x: x[:, :7], "x: (5, 7) is not valid; give [5, 8]"),
        (
            "x",
            lambda x: x.float(),
            "x: torch.float32 is not valid; give torch.bfloat16, or make the group with",
        ),
        ("x", lambda x: x.repeat(2, 1), "x: 10 is not valid; give at most max_tokens, 5 tokens"),
        ("ids", lambda ids: ids[:4], "topk_ids: (4, 2) is not valid; give [5, 2]"),
        ("ids", lambda ids: ids.float(), "topk_ids: torch.float32 is not valid; give integers"),
        ("weights", lambda weights: weights.long(), "topk_weights: torch.int64 is not valid; give floats"),
    ],
)
def test_wrong_tensors_are_refused_before_anything_is_sent(name: str, change: Any, problem: str) -> None:
    tokens = make_tokens([5], 4, 2)
    given = {"x": tokens.x[0], "ids": tokens.ids[0], "weights": tokens.weights[0]}
    with movers("local", 1) as ends:
        (group,) = groups_of(ends, tokens)
        with pytest.raises(ConfigError, match=re.escape(problem)):
            group.dispatch(*{**given, name: change(given[name])}.values())
        rows, _, handle = group.dispatch(*given.values())
        with pytest.raises(ConfigError, match=r"rows: \(3, 8\) is not valid; give \[10, 8\]"):
            group.combine(rows[:3], handle)
