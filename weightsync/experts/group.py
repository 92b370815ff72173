"""Tokens to experts and back, in the order and dtype that a layer needs, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from weightsync.errors import ConfigError
from weightsync.experts.fp8 import Fp8Rows, quantised
from weightsync.experts.movers import Mover
from weightsync.experts.routes import Routes, check_fits, check_ids, worst_capacity
from weightsync.experts.routing import Routing

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class ExpertGroup:
    """One rank's end of a layer's experts, which are on several ranks.

        rows, counts, handle = group.dispatch(x, topk_ids, topk_weights)
        tokens = group.combine(experts(rows, counts), handle)

    Rank r has the experts ``r * L`` to ``(r + 1) * L - 1``. All ranks make the group with the same settings,
    and call it in the same order, also backwards.

    Attributes:
        rank: this rank.
        num_ranks: all ranks.
        num_local_experts: L, the experts of each rank.
        capacity: rows of `dispatch`, the same number in every call.
    """

    def __init__(
        self,
        mover: Mover,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        alignment: int = 1,
        capacity: int | None = None,
        drops: bool = False,
        fp8: bool = False,
        check: bool = True,
    ) -> None:
        """
        Args:
            mover: moves rows between the ranks.
            num_experts: experts of all ranks together, a multiple of the number of ranks.
            top_k: experts per token, at most.
            hidden: elements of a token.
            max_tokens: tokens of a rank in a call, at most. Ranks may have different numbers of tokens.
            dtype: the dtype of tokens, and of rows without `fp8`.
            alignment: an expert's first row is a multiple of it, for grouped GEMMs.
            capacity: rows of a rank, a multiple of `alignment`. By default every choice of experts fits.
            drops: True to leave out rows that do not fit, the last ones in the order of rows. By default
                every rank raises a ConfigError.
            fp8: rows are `Fp8Rows`, without gradients.
            check: compare ids and capacity in each dispatch, for which the CPU waits for a GPU. Without it,
                ids out of range count as no expert.

        Raises ConfigError: a setting is not valid, or not the same on all ranks.
        """
        for name, value in (("hidden", hidden), ("max_tokens", max_tokens), ("alignment", alignment)):
            if value < 1:
                raise ConfigError(name, value, "give 1 or more")
        if num_experts < 1 or num_experts % mover.num_ranks:
            nearest = max(1, round(num_experts / mover.num_ranks)) * mover.num_ranks
            raise ConfigError(
                "num_experts", num_experts, f"give a multiple of {mover.num_ranks} ranks: {nearest}"
            )
        if not 1 <= top_k <= num_experts:
            raise ConfigError("top_k", top_k, f"give 1 to {num_experts}")
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, f"give one of {', '.join(map(str, DTYPES))}")
        self.num_local_experts = num_experts // mover.num_ranks
        worst = worst_capacity(mover.num_ranks, max_tokens, top_k, self.num_local_experts, alignment)
        self.capacity = worst if capacity is None else capacity
        if self.capacity < 1 or self.capacity % alignment:
            nearest = max(1, round(self.capacity / alignment)) * alignment
            raise ConfigError("capacity", self.capacity, f"give a multiple of alignment: {nearest}")
        if self.capacity < worst and not (drops or check):
            raise ConfigError("check", check, f"give True, drops=True, or a capacity of {worst} or more")
        self._mover, self.rank, self.num_ranks = mover, mover.rank, mover.num_ranks
        self._num_experts, self._top_k, self._hidden, self._dtype = num_experts, top_k, hidden, dtype
        self._max_tokens, self._alignment, self._drops = max_tokens, alignment, drops
        self._fp8, self._check = fp8, check
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
        if self._fp8:
            rows: Any = Fp8Rows.split(self._mover.spread(quantised(x), routing), self._hidden)
        else:
            rows = _Dispatch.apply(x, self._mover, routing)  # type: ignore[no-untyped-call]
        return rows, routing.counts, routing

    def combine(self, rows: torch.Tensor, handle: Routing) -> torch.Tensor:
        """Return the weighted sum of each token's rows: [n, hidden], in the dtype of `rows`.

        Tokens without an expert are zero. Weights and sums are float32; each rank's sum travels in the dtype
        of `rows`.

        Raises:
            ConfigError: the shape or the dtype of `rows`.
            DeadlineError, PeerLostError, TransportError: a rank is late or lost.
        """
        _check("rows", rows, (self.capacity, self._hidden), self._dtype)
        tokens: torch.Tensor = _Combine.apply(rows, handle.topk_weights, self._mover, handle)  # type: ignore[no-untyped-call]
        return tokens

    def _route(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Routing:
        """Exchange ids and weights, and plan."""
        part = torch.full((self._max_tokens, 2 * self._top_k), -1, device=topk_ids.device)
        part[: len(topk_ids)] = torch.cat(
            [topk_ids.long(), topk_weights.detach().double().view(torch.int64)], 1
        )
        told = self._mover.gather(part)
        every_id, words = told[..., : self._top_k], told[..., self._top_k :]
        weights = words.view(torch.float64).to(torch.promote_types(self._dtype, torch.float32))
        if self._check:
            check_ids(every_id, self._num_experts)
        routes = Routes.plan(every_id, self._num_experts, self._alignment, self.capacity)
        if self._check and not self._drops:
            check_fits(routes, self.capacity)
        return Routing(self.rank, self.capacity, routes, weights, topk_weights)

    def _check_tokens(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        if len(x) > self._max_tokens:
            raise ConfigError("x", len(x), f"give at most max_tokens, {self._max_tokens} tokens")
        _check("x", x, (len(x), self._hidden), self._dtype)
        for name, given in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            _check(name, given, (len(x), self._top_k))
            if given.is_floating_point() != (name == "topk_weights"):
                kind = "floats" if name == "topk_weights" else "integers"
                raise ConfigError(name, given.dtype, f"give {kind}")
        if self._fp8 and x.requires_grad:
            raise ConfigError("x", "requires_grad", "FP8 rows have no gradients: give x.detach()")

    def _agree(self) -> None:
        """Raise ConfigError if ranks have different settings."""
        settings = {
            "num_experts": self._num_experts,
            "top_k": self._top_k,
            "hidden": self._hidden,
            "max_tokens": self._max_tokens,
            "dtype": DTYPES.index(self._dtype),
            "alignment": self._alignment,
            "capacity": self.capacity,
            "drops": self._drops,
            "fp8": self._fp8,
            "check": self._check,
        }
        told = self._mover.gather(torch.tensor([[*map(int, settings.values())]]))[:, 0].tolist()
        for rank, theirs in enumerate(told):
            for (name, mine), other in zip(settings.items(), theirs, strict=True):
                if mine != other:
                    both = [DTYPES[each] if name == "dtype" else each for each in (mine, other)]
                    raise ConfigError(name, both[0], f"rank {rank} has {both[1]}: give all ranks the same")


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
        ctx.save_for_backward(rows)
        return mover.collect(rows, routing, routing.weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        mover, routing = ctx.mover, ctx.routing
        (rows,) = ctx.saved_tensors
        spread = mover.spread(grad, routing).to(routing.weights.dtype)
        of_rows = (spread * routing.per_row(routing.weights)[:, None]).to(rows.dtype)
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None, None
        products = (spread * rows).sum(1).index_select(0, routing.mine.clamp(min=0).flatten())
        mine = torch.where(routing.mine >= 0, products.view_as(routing.mine), 0)
        parts = mover.exchange(mine, routing.receives, routing.sends)[:, : routing.num_tokens]
        return of_rows, parts.sum(0).to(routing.topk_weights.dtype), None, None


def _check(name: str, given: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> None:
    if given.shape != shape:
        raise ConfigError(name, tuple(given.shape), f"give {list(shape)}")
    if dtype and given.dtype != dtype:
        raise ConfigError(name, given.dtype, f"give {dtype}, or make the group with the other dtype")
