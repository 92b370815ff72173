"""The handle of a dispatch: one rank's view of the routes, with the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from weightsync.experts.routes import Routes


@dataclass(frozen=True, eq=False)
class Routing:
    """The handle of a dispatch, for `combine`. Counts and offsets stay on the device.

    Attributes:
        rank: this rank.
        capacity: this rank's rows, used or not.
        routes: the plan of all ranks.
        weights: float32[R, T, K], the weights of all ranks' tokens.
        topk_weights: [num_tokens, K], this rank's weights as given, for their gradient.
    """

    rank: int
    capacity: int
    routes: Routes
    weights: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """Rows of each local expert, without padding: int64[L]."""
        return self.routes.counts[self.rank]

    @property
    def offsets(self) -> torch.Tensor:
        """First row of each local expert, a multiple of the alignment, and the end: int64[L + 1]."""
        return self.routes.offsets[self.rank]

    @property
    def dropped(self) -> torch.Tensor:
        """True for this rank's choices of an expert whose row did not fit: bool[num_tokens, K]."""
        row, owner = (each[self.rank, : self.num_tokens] for each in (self.routes.row, self.routes.owner))
        return (owner < len(self.routes.row)) & (row < 0)

    @property
    def num_tokens(self) -> int:
        """This rank's tokens."""
        return len(self.topk_weights)

    @property
    def sends(self) -> torch.Tensor:
        """True for this rank's tokens that each rank needs: bool[R, T]."""
        return self.routes.here[self.rank].T

    @property
    def receives(self) -> torch.Tensor:
        """True for each rank's tokens that this rank needs: bool[R, T]."""
        return self.routes.here[:, :, self.rank]

    @cached_property
    def mine(self) -> torch.Tensor:
        """Rows on this rank, -1 for rows of other ranks: int64[R, T, K]."""
        return torch.where(self.routes.owner == self.rank, self.routes.row, -1)

    def per_row(self, values: torch.Tensor, empty: int = 0) -> torch.Tensor:
        """Return [capacity] of `values` [R, T, K] at this rank's rows, and `empty` elsewhere."""
        at = torch.where(self.mine >= 0, self.mine, self.capacity)  # one more row takes all others
        return values.new_full((self.capacity + 1,), empty).scatter_(0, at.flatten(), values.flatten())[:-1]

    def placed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copy all ranks' tokens [R, T, W] to this rank's rows [capacity, W]. Other rows are zero."""
        flat = tokens.flatten(0, 1)
        number = torch.arange(len(flat), device=flat.device).view(*tokens.shape[:2], 1)
        source = self.per_row(number.expand_as(self.mine), -1)
        rows = flat.index_select(0, source.clamp(min=0))
        return torch.where(source[:, None] >= 0, rows, 0)

    def partial_sums(self, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Sum the rows of each token [R, T, W], weighted, in the order of k and in float32 or better."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((self.mine[..., 0].numel(), rows.shape[1]), dtype=dtype)
        for k, at in enumerate(self.mine.flatten(0, 1).T):
            term = rows.index_select(0, at.clamp(min=0)).to(dtype)
            if weights is not None:
                term *= weights[..., k].reshape(-1, 1)
            total += torch.where(at[:, None] >= 0, term, 0)
        return total.to(rows.dtype).view(*self.mine.shape[:2], -1)
