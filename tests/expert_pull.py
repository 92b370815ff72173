"""Compares the kernel's rows with plain torch's, for some sizes and dtypes. An argument is the device."""

from __future__ import annotations

import sys

import torch

from tests.expert_ranks import make_tokens
from weightsync.experts.pull import pull_rows
from weightsync.experts.routes import Routes
from weightsync.experts.routing import Routing


def compare(device: str) -> None:
    for hidden, dtype, top_k in (
        (8, torch.bfloat16, 3),
        (3, torch.bfloat16, 1),
        (1030, torch.float32, 4),
        (5, torch.uint8, 2),
    ):
        tokens = make_tokens([4, 4, 4], 6, top_k, hidden)
        x = torch.stack(tokens.x).mul(50).to(device, dtype)
        routes = Routes.plan(torch.stack(tokens.ids).to(device), 6, 4, 32)
        addresses = torch.tensor([each.data_ptr() for each in x], device=device)
        for rank in range(3):
            routing = Routing(rank, 32, routes, addresses, addresses)
            rows = torch.full((32, hidden), 77, device=device).to(dtype)
            pull_rows(addresses, routing.mine, rows)
            wanted = routing.placed(x)
            used = routing.per_row(torch.ones_like(routing.mine)) > 0
            assert torch.equal(rows[used], wanted[used])
            assert bool((rows[~used] == 77).all())
            assert int(used.sum()) == int(routing.counts.sum())


if __name__ == "__main__":
    compare(*sys.argv[1:] or ["cpu"])
