"""Ranks that exchange tokens as threads of this process, by each mover, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from tests.patience import patient
from weightsync.experts import ForwardingMover, LocalMover, MessageMover, Mover, SharedMemoryMover

T = TypeVar("T")

MOVERS = ("local", "shared memory", "messages", "forwarding")


def in_threads(call: Callable[..., T], *per_rank: Iterable[Any]) -> list[T]:
    """Return what `call` returns for each rank, all at once. An error is raised once all have ended."""
    given = [*zip(*per_rank, strict=True)]
    with ThreadPoolExecutor(len(given)) as pool:
        return [each.result() for each in [pool.submit(call, *arguments) for arguments in given]]


@contextmanager
def movers(kind: str, num_ranks: int, timeout_s: float | None = None) -> Iterator[Sequence[Mover]]:
    """Yield a mover of each rank."""
    timeout_s = timeout_s or patient(20)
    if kind == "local":
        yield LocalMover.ranks(num_ranks, timeout_s)
        return
    if kind == "forwarding":
        num_local = next(num for num in (2, 3, 1) if num_ranks % num == 0)
        yield forwarding(num_ranks // num_local, num_local, timeout_s)
        return
    store = HashStore()
    groups = in_threads(lambda rank: gloo_group(store, rank, num_ranks), range(num_ranks))
    if kind == "messages":
        yield [MessageMover(group) for group in groups]
        return
    made = in_threads(lambda group: SharedMemoryMover(group, timeout_s), groups)
    try:
        yield made
    finally:
        for each in made:
            each.close()


def forwarding(num_hosts: int, num_local: int, timeout_s: float) -> Sequence[ForwardingMover]:
    """Ranks as on `num_hosts` hosts with `num_local` ranks each."""
    across = [LocalMover.ranks(num_hosts, timeout_s) for _ in range(num_local)]
    within = [LocalMover.ranks(num_local, timeout_s) for _ in range(num_hosts)]
    grid = [(h, each) for h in range(num_hosts) for each in range(num_local)]
    return [ForwardingMover(across[each][h], within[h][each]) for h, each in grid]


def gloo_group(store: Store, rank: int, num_ranks: int) -> dist.ProcessGroup:
    """A group that is not torch's default group, so that threads can be ranks."""
    group: Any = dist.ProcessGroup(store, rank, num_ranks)
    backend = ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=patient(20)))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@dataclass(frozen=True)
class Tokens:
    """The tokens of all ranks, and what they choose."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    num_experts: int

    @property
    def num_local(self) -> int:
        return self.num_experts // len(self.x)

    @property
    def max_tokens(self) -> int:
        return max(1, *map(len, self.x))


def make_tokens(
    num_tokens: Sequence[int],
    num_experts: int,
    top_k: int,
    hidden: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    skew: float = 0.0,
    empty: float = 0.1,
) -> Tokens:
    """Make tokens whose experts are drawn without repetition; `empty` of all choices are -1.

    With much `skew`, most tokens choose the first experts.
    """
    draw = torch.Generator().manual_seed(seed)
    likely = torch.exp(-skew * torch.arange(num_experts))
    x, ids, weights = [], [], []
    for num in num_tokens:
        noise = -torch.rand(num, num_experts, generator=draw).log() / likely
        chosen = noise.topk(top_k, largest=False).indices
        ids.append(torch.where(torch.rand(num, top_k, generator=draw) < empty, -1, chosen))
        x.append(torch.randn(num, hidden, generator=draw).to(dtype))
        weights.append(
            torch.rand(num, top_k, generator=draw, dtype=torch.promote_types(dtype, torch.float32))
        )
    return Tokens(x, ids, weights, num_experts)


@dataclass(frozen=True)
class Row:
    """A row of an expert."""

    expert: int
    rank: int
    token: int
    k: int


def plain_rows(tokens: Tokens, owner: int, alignment: int, capacity: int) -> list[Row | None]:
    """The rows of a rank by a loop: by expert, rank, token."""
    rows: list[Row | None] = []
    for expert in range(owner * tokens.num_local, (owner + 1) * tokens.num_local):
        rows += [None] * (-len(rows) % alignment)
        for rank, ids in enumerate(tokens.ids):
            for token, k in (ids == expert).nonzero().tolist():
                rows.append(Row(expert, rank, token, k))
    return (rows + [None] * capacity)[:capacity]
