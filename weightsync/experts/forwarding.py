"""Tokens between ranks of several hosts: once to each host, and from there to the host's other ranks.

The idea is FUSCO's forwarding (https://arxiv.org/abs/2512.22036).
"""

from __future__ import annotations

import torch

from weightsync.experts.movers import Mover
from weightsync.experts.routing import Routing


class ForwardingMover(Mover):
    """Ranks of H hosts with L ranks each: rank ``h * L + l`` is rank l of host h.

    A row for ranks of another host first goes to the rank there that has the same l. That rank passes it on.
    In `collect`, the ranks of a host sum their results of a token, before the sum goes to the token's host.
    That sum is rounded to the dtype of the rows, too.
    """

    def __init__(self, across: Mover, within: Mover) -> None:
        """
        Args:
            across: moves rows between the ranks with the same l, in the order of hosts.
            within: moves rows between the ranks of this host.
        """
        self._across, self._within, self.device = across, within, across.device
        self._grid = across.num_ranks, within.num_ranks
        self.num_ranks = across.num_ranks * within.num_ranks
        self.rank = across.rank * within.num_ranks + within.rank

    def check(self) -> None:
        """See `Mover.check`."""
        self._across.check()
        self._within.check()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `Mover.gather`. A part goes to each host once."""
        return self._by_rank(self._within.gather(self._across.gather(part).flatten(0, 1)))

    def exchange(self, sent: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor) -> torch.Tensor:
        """See `Mover.exchange`. The ranks with the same l tell each other first which rank gets which row."""
        (num_hosts, num_local), num = self._grid, sends.shape[1]
        told = self._across.gather(sends.T.contiguous().view(torch.uint8)).bool()
        passes = told.view(num_hosts, num, *self._grid)[:, :, self._across.rank].permute(2, 0, 1)  # [L, H, T]
        if sent.ndim == 2:
            sends = sends.view(*self._grid, num).any(1)
            got = self._across.exchange(sent, sends, passes.any(0)).flatten(0, 1)
        else:
            rows = torch.nn.functional.pad(sent, (0, 0, 0, num - sent.shape[1]))
            rows, sends = rows.reshape(num_hosts, num_local * num, -1), sends.reshape(num_hosts, -1)
            got = self._across.exchange(rows, sends, passes.transpose(0, 1).flatten(1))
            got = self._by_local(got.view(self.num_ranks, num, -1))
        return self._by_rank(self._within.exchange(got, passes.flatten(1), self._by_local(receives)))

    def collect(self, rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None) -> torch.Tensor:
        """See `Mover.collect`."""
        host, local = self._across.rank, self._within.rank
        here = routing.routes.here.view(*self._grid, -1, *self._grid)  # of ranks, tokens, ranks
        sums = routing.partial_sums(rows, weights)
        mine = here[:, local, :, host].permute(2, 0, 1).flatten(1)  # [L, H * T]: tokens of ranks with this l
        parts = self._within.exchange(self._by_local(sums), self._by_local(routing.receives), mine)
        parts = _added(parts).view(self._grid[0], -1, rows.shape[1])
        masks = here[:, local, :, host].any(2), here[host, local].any(2).T
        return _added(self._across.exchange(parts, *masks))[: routing.num_tokens]

    def _by_local(self, per_rank: torch.Tensor) -> torch.Tensor:
        """Turn [R, T, …] into [L, H * T, …]."""
        return per_rank.view(*self._grid, *per_rank.shape[1:]).transpose(0, 1).flatten(1, 2)

    def _by_rank(self, per_local: torch.Tensor) -> torch.Tensor:
        """Turn [L, H * T, …] into [R, T, …]."""
        num_hosts, num_local = self._grid
        return per_local.view(num_local, num_hosts, -1, *per_local.shape[2:]).transpose(0, 1).flatten(0, 1)


def _added(parts: torch.Tensor) -> torch.Tensor:
    """Sum [n, T, W] to [T, W] in float32 or better, in the order of n."""
    return parts.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32)).to(parts.dtype)
