"""Tokens to experts and back, in the order and dtype that a layer needs, with gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from weightsync.errors import ConfigError
from weightsync.experts.movers import Mover
from weightsync.experts.routes import check_fits, check_ids, worst_capacity
from weightsync.experts.routing import Routing

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(eq=False)
class ExpertGroup:
    """One rank's end of a layer's experts, which are on several ranks.

        rows, counts, handle = group.dispatch(x, topk_ids, topk_weights)
        tokens = group.combine(experts(rows, counts), handle)

    Rank r has the experts ``r * L`` to ``(r + 1) * L - 1``. All ranks make the group with the same settings,
    and call it in the same order, also backwards.

    Attributes:
        mover: moves rows between the ranks.
        num_experts: experts of all ranks together, a multiple of the number of ranks.
        top_k: experts per token, at most.
        hidden: elements of a token.
        max_tokens: tokens of a rank in a call, at most. Ranks may have different numbers of tokens.
        dtype: the dtype of tokens, and of rows without `fp8`.
        alignment: an expert's first row is a multiple of it, for grouped GEMMs.
        capacity: rows of `dispatch`, a multiple of `alignment`. By default every choice of experts fits.
        drops: True to leave out rows that do not fit, the last ones in the order of rows. By default every
            rank raises a ConfigError.
        fp8: rows are `Fp8Rows`, without gradients.
        check: compare ids and capacity in each dispatch, for which the CPU waits for a GPU. Without it, ids
            out of range count as no expert.

    Raises ConfigError: a setting is not valid, or not the same on all ranks.
    """

    mover: Mover
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    _: KW_ONLY
    dtype: torch.dtype = torch.bfloat16
    alignment: int = 1
    capacity: int = 0
    drops: bool = False
    fp8: bool = False
    check: bool = True

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden", "max_tokens", "alignment"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(name, value, "give 1 or more")
        _check_multiple("num_experts", self.num_experts, self.mover.num_ranks, "the number of ranks")
        if self.top_k > self.num_experts:
            raise ConfigError("top_k", self.top_k, f"give num_experts, {self.num_experts}, or less")
        if self.dtype not in _DTYPES:
            raise ConfigError("dtype", self.dtype, f"give one of {', '.join(map(str, _DTYPES))}")
        num_ranks, num_local = self.mover.num_ranks, self.num_experts // self.mover.num_ranks
        worst = worst_capacity(num_ranks, self.max_tokens, self.top_k, num_local, self.alignment)
        self.capacity = self.capacity or worst
        _check_multiple("capacity", self.capacity, self.alignment, "alignment")
        if self.capacity < worst and not (self.drops or self.check):
            raise ConfigError("check", False, f"give True, drops=True, or a capacity of {worst} or more")
        self._agree()

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[Any, torch.Tensor, Routing]:
        """Bring tokens to the ranks of their experts.

        Args:
            x: tokens [n, hidden], of the group's dtype.
            topk_ids: experts of each token [n, k], of any integer dtype; -1 for no expert.
            topk_weights: weights of these experts [n, k], of any float dtype.

        Returns:
            rows [capacity, hidden] by local expert, source rank, token (rows without a token are zero); the
            number of rows per local expert, int64[L]; the handle for `combine`, whose `offsets` has the
            first row of each expert.

        Raises:
            ConfigError: a shape, a dtype, an id or the capacity. For ids and capacity, on every rank.
            DeadlineError, PeerLostError, TransportError: a rank is late or lost.
        """
        self._check_tokens(x, topk_ids, topk_weights)
        routing = self._route(topk_ids, topk_weights)
        if self.fp8:
            rows: Any = self.mover.spread_fp8(x.detach(), routing)
        else:
            rows = _Dispatch.apply(x, self.mover, routing)  # type: ignore[no-untyped-call]
        return rows, routing.counts, routing

    def combine(self, rows: torch.Tensor, handle: Routing) -> torch.Tensor:
        """Return the weighted sum of each token's rows: [n, hidden], in the dtype of `rows`.

        Tokens without an expert are zero. Weights and sums are float32; each rank's sum travels in the dtype
        of `rows`.

        Raises:
            ConfigError: the shape or the dtype of `rows`.
            DeadlineError, PeerLostError, TransportError: a rank is late or lost.
        """
        _check("rows", rows, (self.capacity, self.hidden), self.dtype)
        tokens: torch.Tensor = _Combine.apply(rows, handle.topk_weights, self.mover, handle)  # type: ignore[no-untyped-call]
        return tokens

    def _route(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Routing:
        """Exchange ids and weights, and plan."""
        part = torch.full((self.max_tokens, 2 * self.top_k), -1, device=topk_ids.device)
        part[: len(topk_ids)] = torch.cat(
            [topk_ids.long(), topk_weights.detach().double().view(torch.int64)], 1
        )
        told = self.mover.gather(part)
        every_id, words = told[..., : self.top_k], told[..., self.top_k :]
        weights = words.view(torch.float64).to(torch.promote_types(self.dtype, torch.float32))
        if self.check:
            check_ids(every_id, self.num_experts)
        routes = self.mover.plan(every_id, self.num_experts, self.alignment, self.capacity)
        if self.check and not self.drops:
            check_fits(routes, self.capacity)
        return Routing(self.mover.rank, self.capacity, routes, weights, topk_weights)

    def _check_tokens(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        if len(x) > self.max_tokens:
            raise ConfigError("x", len(x), f"give at most max_tokens, {self.max_tokens} tokens")
        _check("x", x, (len(x), self.hidden), self.dtype)
        for name, given in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            _check(name, given, (len(x), self.top_k))
            if given.is_floating_point() != (name == "topk_weights"):
                kind = "floats" if name == "topk_weights" else "integers"
                raise ConfigError(name, given.dtype, f"give {kind}")
        if self.fp8 and x.requires_grad:
            raise ConfigError("x", "requires_grad", "FP8 rows have no gradients: give x.detach()")

    def _agree(self) -> None:
        """Raise ConfigError if ranks have different settings."""
        names = [each.name for each in fields(self)][1:]
        settings = [getattr(self, name) for name in names]
        numbers = [_DTYPES.index(each) if isinstance(each, torch.dtype) else int(each) for each in settings]
        told = self.mover.gather(torch.tensor([numbers], device=self.mover.device))[:, 0].tolist()
        self.mover.check()
        for rank, theirs in enumerate(told):
            for name, setting, mine, other in zip(names, settings, numbers, theirs, strict=True):
                if mine != other:
                    shown = _DTYPES[other] if name == "dtype" else other
                    raise ConfigError(name, setting, f"rank {rank} has {shown}: give all ranks the same")


class _Dispatch(torch.autograd.Function):
    """The gradient of tokens is the sum of the gradients of their rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mover: Mover, routing: Routing) -> torch.Tensor:  # noqa: ANN401
        ctx.mover, ctx.routing = mover, routing
        return mover.spread(x, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        return ctx.mover.collect(grad, ctx.routing, None), None, None


class _Combine(torch.autograd.Function):
    """The gradient of a row is the gradient of its token, times the weight."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: torch.Tensor,
        _: torch.Tensor,
        mover: Mover,
        routing: Routing,
    ) -> torch.Tensor:
        ctx.mover, ctx.routing = mover, routing
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(rows)
        return mover.collect(rows, routing, routing.weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        mover, routing = ctx.mover, ctx.routing
        spread = mover.spread(grad, routing).to(routing.weights.dtype)
        of_rows = (spread * routing.per_row(routing.weights)[:, None]).to(grad.dtype)
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None, None
        (rows,) = ctx.saved_tensors
        products = (spread * rows).sum(1).index_select(0, routing.mine.clamp(min=0).flatten())
        mine = torch.where(routing.mine >= 0, products.view_as(routing.mine), 0)
        parts = mover.exchange(mine, routing.receives, routing.sends)[:, : routing.num_tokens]
        return of_rows, parts.sum(0).to(routing.topk_weights.dtype), None, None


def _check(name: str, given: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> None:
    if given.shape != shape:
        raise ConfigError(name, tuple(given.shape), f"give {list(shape)}")
    if dtype and given.dtype != dtype:
        raise ConfigError(name, given.dtype, f"give {dtype}, or make the group with the other dtype")


def _check_multiple(name: str, value: int, unit: int, what: str) -> None:
    if value < 1 or value % unit:
        nearest = max(1, round(value / unit)) * unit
        raise ConfigError(name, value, f"give a multiple of {what}, {unit}, such as {nearest}")
