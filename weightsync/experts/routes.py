"""Plans which row of which rank gets which token, on the device of the ids, without reading values back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Rows of R ranks for T tokens per rank with K experts per token. Every rank plans the same.

    A rank's rows are sorted by local expert, then by source rank, then by token. An expert's first row is a
    multiple of the alignment.

    Attributes:
        row: int64[R, T, K], the row on the expert's rank; -1 without an expert, or if the row does not fit.
        owner: int64[R, T, K], the expert's rank; R without an expert.
        here: bool[R, T, R], True if a token of the first rank has a row on the last rank.
        counts: int64[R, L], rows per expert, without padding and rows that do not fit.
        offsets: int64[R, L + 1], each expert's first row, and the end.
        needed: int64[R], the capacity at which every row fits.
    """

    row: torch.Tensor
    owner: torch.Tensor
    here: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    needed: torch.Tensor

    @classmethod
    def plan(cls, ids: torch.Tensor, num_experts: int, alignment: int, capacity: int) -> Routes:
        """Plan rows for expert ids: int64[R, T, K]. Ids out of range count as no expert."""
        num_ranks = len(ids)
        expert = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).flatten()
        order = expert.argsort(stable=True)  # by expert, source rank, token
        bounds = torch.arange(num_experts + 1, device=ids.device)
        starts = torch.searchsorted(expert[order], bounds)
        counts = starts.diff().view(num_ranks, -1)
        padded = (counts + alignment - 1) // alignment * alignment
        offsets = torch.nn.functional.pad(padded.cumsum(1), (1, 0))
        shift = offsets[:, :-1].flatten() - starts[:-1]
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
        row = position + torch.nn.functional.pad(shift, (0, 1))[expert]
        row = torch.where((expert < num_experts) & (row < capacity), row, -1).view_as(ids)
        owner = (expert // (num_experts // num_ranks)).view_as(ids)
        ranks = torch.arange(num_ranks, device=ids.device)
        here = ((owner[..., None] == ranks) & (row[..., None] >= 0)).any(2)
        fitting = torch.minimum(counts, (capacity - offsets[:, :-1]).clamp(min=0))
        return cls(row, owner, here, fitting, offsets.clamp(max=capacity), offsets[:, -1])


def worst_capacity(num_ranks: int, max_tokens: int, top_k: int, num_local: int, alignment: int) -> int:
    """Return the rows of a rank if every token of every rank goes there."""
    rows = num_ranks * max_tokens * min(top_k, num_local) + num_local * (alignment - 1)
    return -(-rows // alignment) * alignment


def check_ids(ids: torch.Tensor, num_experts: int) -> None:
    """Raise ConfigError for an id out of range, or twice in a token: int64[R, T, K]. Waits for a GPU."""
    ordered = ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    outside = (ids < -1) | (ids >= num_experts)
    if not bool(outside.any() | twice.any()):
        return
    if bool(outside.any()):
        found, values, remedy = outside, ids, f"give 0 to {num_experts - 1}, or -1 for no expert"
    else:
        found, values, remedy = twice, ordered[..., 1:], "give an expert once per token"
    rank, token, k = found.nonzero()[0].tolist()
    raise ConfigError("topk_ids", int(values[rank, token, k]), f"rank {rank}, token {token}: {remedy}")


def check_fits(routes: Routes, capacity: int) -> None:
    """Raise ConfigError if a row does not fit. Waits for a GPU."""
    needed = routes.needed.tolist()
    if max(needed) > capacity:
        rank = needed.index(max(needed))
        missing = f"rank {rank} needs {max(needed)} rows"
        raise ConfigError("capacity", capacity, f"{missing}: give {max(needed)} or more, or drops=True")
