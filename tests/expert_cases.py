"""Layers whose results on a GPU, or by interpreted kernels, are compared with `LocalMover`'s on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.expert_ranks import Tokens, in_threads, make_tokens
from weightsync.experts import ExpertGroup, LocalMover, Mover

ROUTES = ("row", "owner", "here", "counts", "offsets", "needed")


@dataclass(frozen=True)
class Case:
    """Tokens, and the settings of the group."""

    hidden: int = 8
    dtype: torch.dtype = torch.bfloat16
    top_k: int = 3
    num_local: int = 3
    num_tokens: tuple[int, ...] = (7, 0, 12, 5)
    skew: float = 0.0
    empty: float = 0.1
    settings: dict[str, Any] = field(default_factory=dict)

    def tokens(self, num_ranks: int, seed: int = 0) -> Tokens:
        given = self.num_tokens[:num_ranks], self.num_local * num_ranks, self.top_k
        return make_tokens(*given, self.hidden, self.dtype, seed, self.skew, self.empty)


CASES = {
    "bfloat16": Case(),
    "aligned rows": Case(settings={"alignment": 4}),
    "no multiple of 16 bytes": Case(hidden=3, dtype=torch.float16),
    "float32": Case(hidden=1030, dtype=torch.float32),
    "float64": Case(hidden=5, dtype=torch.float64),
    "all to one rank": Case(skew=50.0, num_tokens=(40, 3, 40, 9)),
    "no expert": Case(empty=1.0),
    "an expert per token": Case(top_k=1, num_local=1, hidden=130),
    "drops": Case(settings={"capacity": 8, "alignment": 4, "drops": True}),
    "FP8": Case(hidden=256, settings={"fp8": True}),
    "FP8, with a short block": Case(hidden=200, settings={"fp8": True, "alignment": 8}),
}
LARGE = Case(hidden=7168, top_k=4, num_local=4, num_tokens=(64, 100, 1, 33), settings={"alignment": 16})


@dataclass
class Outcome:
    """What a rank gets."""

    rows: torch.Tensor
    scales: torch.Tensor
    routes: list[torch.Tensor]
    tokens: torch.Tensor
    grads: list[torch.Tensor]


def group_of(end: Mover, tokens: Tokens, **settings: Any) -> ExpertGroup:
    usual: dict[str, Any] = {
        "hidden": tokens.x[0].shape[1],
        "max_tokens": tokens.max_tokens,
        "dtype": tokens.x[0].dtype,
    }
    return ExpertGroup(end, tokens.num_experts, tokens.ids[0].shape[1], **usual | settings)


def layer(end: Mover, tokens: Tokens, **settings: Any) -> Outcome:
    """Run a rank's part of a layer, forwards and backwards."""
    group = group_of(end, tokens, **settings)
    x, ids, weights = (each[end.rank].to(end.device) for each in (tokens.x, tokens.ids, tokens.weights))
    x, weights = x.clone().requires_grad_(not group.fp8), weights.clone().requires_grad_()
    rows, _, handle = group.dispatch(x, ids, weights)
    done = rows.dequantised().to(x.dtype) if group.fp8 else rows * 2
    out = group.combine(done, handle)
    (out * torch.arange(out.shape[1], device=out.device)).sum().backward()  # type: ignore[no-untyped-call]
    routes = [getattr(handle.routes, name).cpu() for name in ROUTES]
    grads = [each.grad.cpu() for each in (x, weights) if each.grad is not None]
    values, scales = (rows.values.view(torch.uint8), rows.scales) if group.fp8 else (rows.detach(), rows[:0])
    return Outcome(values.cpu(), scales.cpu(), routes, out.detach().cpu(), grads)


def expected(tokens: Tokens, **settings: Any) -> Sequence[Outcome]:
    """Return every rank's outcome on the CPU."""
    return in_threads(lambda end: layer(end, tokens, **settings), LocalMover.ranks(len(tokens.x)))


def assert_same(found: Outcome, wanted: Outcome) -> None:
    """Rows are equal bit for bit. Sums may be rounded otherwise."""
    for name, mine, theirs in zip(ROUTES, found.routes, wanted.routes, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    assert torch.equal(found.rows.view(torch.uint8), wanted.rows.view(torch.uint8))
    assert torch.equal(found.scales, wanted.scales)
    assert_close(found.tokens, wanted.tokens)
    for mine, theirs in zip(found.grads, wanted.grads, strict=True):
        assert_close(mine, theirs)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    tolerance = 8 * torch.finfo(wanted.dtype).eps
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * scale)
