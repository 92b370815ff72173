"""Tokens to experts and back by torch alone: permute, all-to-all, permute, and back with weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class TorchChain:
    """One rank's tokens, ids and weights [T, K], and what the last dispatch gave.

    Rows are in the order of `ExpertGroup.dispatch`, without empty rows. The CPU waits for the numbers
    of rows, which NCCL's all-to-all needs.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    rows: Any = None

    def bare(self) -> None:
        """Send all tokens to each rank, and do nothing else."""
        sent = self._sent_bare
        dist.all_to_all_single(torch.empty_like(sent), sent)

    def __post_init__(self) -> None:
        self._num_ranks, self._top_k = dist.get_world_size(), self.ids.shape[1]
        self._sent_bare = self.x.repeat(self._num_ranks, 1)

    def dispatch(self) -> None:
        chosen = self.ids.flatten()
        self._order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sizes = torch.stack([counts, received]).view(2, self._num_ranks, -1).sum(2).tolist()
        self._num_sent, self._num_received = sizes
        arrived = self._exchanged(self.x[self._order // self._top_k], self._num_sent, self._num_received)
        num_local = self.num_experts // self._num_ranks
        experts = torch.arange(num_local, device=received.device).repeat(self._num_ranks)
        self._sorted = experts.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
        self.rows = arrived[self._sorted]

    def combine(self) -> torch.Tensor:
        back = torch.empty_like(self.rows)
        back[self._sorted] = self.rows
        returned = self._exchanged(back, self._num_received, self._num_sent)
        weighted = returned * self.weights.flatten()[self._order, None]  # float32, as the weights
        tokens = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        return tokens.index_add_(0, self._order // self._top_k, weighted).to(self.x.dtype)

    def both(self) -> None:
        self.dispatch()
        self.combine()

    @staticmethod
    def _exchanged(rows: torch.Tensor, num_sent: list[int], num_received: list[int]) -> torch.Tensor:
        received = rows.new_empty(sum(num_received), rows.shape[1])
        dist.all_to_all_single(received, rows, num_received, num_sent)
        return received
