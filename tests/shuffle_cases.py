"""Shuffles of small models between different layouts, for tests with a process per rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tests.unit.plan.plan_strategies import PAD, Rank, cuts, hold, live, values, write
from weightsync.collectives.shuffle import Shuffle, gather_send, scatter_recv
from weightsync.plan import Box, Layout, RankLayout, Reshard, TensorMeta
from weightsync.plan.cross_host.host_bundles import HostBundles
from weightsync.plan.cross_host.shuffle import Bundle, ShufflePlan
from weightsync.plan.direct.direct import Reads
from weightsync.transports import Transport

CASES = {"apart": (2, 3, False), "both": (2, 2, True), "one": (1, 1, False), "copies": (1, 3, False)}
"""Senders, receivers, and whether the receivers are the senders. In ``copies`` receivers pass data on."""


@dataclass
class Case:
    """A shuffle from uneven rows to columns in a fused parameter; others whole."""

    tensors: list[TensorMeta]
    senders: list[Rank]
    ranks: list[Rank]
    receivers: list[int]
    expected: list[dict[str, np.ndarray]]
    copies: bool = False

    def plan(self, max_message_bytes: int) -> ShufflePlan:
        source, target = (list(map(self._layout, side)) for side in (self.senders, self.ranks))
        if self.copies:
            reshard = Reshard(Layout.from_ranks(source), "target", Layout.from_ranks(target))
            near = [2] * len(source)
            needs = {to: reshard.reads(n, near, start=0) for n, to in enumerate(self.receivers)}
            dealt = bundles(needs, dict.fromkeys(needs, "a host"))
            return ShufflePlan.from_bundles(dealt, len(source), max_message_bytes=max_message_bytes)
        return ShufflePlan.from_layouts(
            source, target, max_message_bytes=max_message_bytes, receivers=self.receivers
        )

    def _layout(self, rank: Rank) -> RankLayout:
        return rank.layout(self.tensors)


def bundles(needs: dict[int, Reads], hosts: dict[int, str]) -> list[Bundle]:
    """Return the bundles of all hosts, with each receiver's reads, for `ShufflePlan.from_bundles`.

    Trainer number t is rank t.
    """
    found: list[Bundle] = []
    for host in sorted(set(hosts.values())):
        ranks = [rank for rank in sorted(needs) if hosts[rank] == host]
        made = HostBundles.of([needs[rank] for rank in ranks])
        for number, (trainer, order) in enumerate(zip(made.trainer.tolist(), made.orders, strict=True)):
            parts = {}
            for place in order:
                parts[ranks[place]] = needs[ranks[place]].take(made.rows_of(place, number))
            found.append((trainer, parts))
    return found


def reads_of(sizes: list[int]) -> Reads:
    """One behind the other, out of one buffer and into one."""
    start = np.cumsum([0, *sizes[:-1]])
    table = np.column_stack([start, start, np.ones_like(start), sizes, sizes, sizes])
    zeros = np.zeros_like(start)
    return Reads.from_table(zeros, ("w",), zeros, ("w",), zeros, table)


def make_case(name: str, rows: int = 1031) -> Case:
    num_senders, num_receivers, both = CASES[name]
    tensors = [
        TensorMeta("gate", "bfloat16", (rows, 300)),
        TensorMeta("up", "bfloat16", (rows, 300)),
        TensorMeta("norm", "float32", (301,)),
        TensorMeta("bias", "int8", (7, 13)),
    ]
    held = values(tensors, seed=len(name))
    senders = [Rank() for _ in range(num_senders)]
    for number, sender in enumerate(senders):
        for meta in tensors:
            start, size = cuts(meta.shape[0], num_senders)[number]
            hold(
                sender,
                meta,
                Box((start, *[0] * (len(meta.shape) - 1)), (size, *meta.shape[1:])),
                held[meta.name],
            )
    ranks = [Rank() for _ in range(num_receivers)]
    for number, rank in enumerate(ranks):
        start, size = (0, 300) if name == "copies" else cuts(300, num_receivers)[number]
        live(rank, "gate_up", "bfloat16", (2 * rows, size))
        for half, meta in enumerate(tensors[:2]):
            write(rank, meta, Box((0, start), (rows, size)), "gate_up", (half * rows, 0))
        for meta in tensors[2:]:
            live(rank, meta.name, meta.dtype, meta.shape)
            write(rank, meta, Box((0,) * len(meta.shape), meta.shape), meta.name, (0,) * len(meta.shape))
    first = 0 if both else num_senders
    expected = [_expected(rank, tensors, held) for rank in ranks]
    receivers = list(range(first, first + num_receivers))
    return Case(tensors, senders, ranks, receivers, expected, copies=name == "copies")


def _expected(rank: Rank, tensors: list[TensorMeta], held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a rank's buffers after each tensor was gathered and sliced."""
    dtypes = {meta.name: meta.dtype for meta in tensors}
    for segment in rank.segments:
        rank.view(segment, dtypes[segment.tensor])[...] = held[segment.tensor][segment.box.slices()]
    expected = {name: memory.copy() for name, memory in rank.memory.items()}
    for memory in rank.memory.values():
        memory[:] = PAD
    return expected


def shuffle_case(
    name: str, rows: int, max_message_bytes: int, rank: int, transport: Transport, device: str
) -> dict[str, object]:
    """Run `rank`'s part once by its function, twice by one `Shuffle`.

    Returns checks and costs.
    """
    case = make_case(name, rows)
    plan = case.plan(max_message_bytes)
    sends, receives = rank < plan.num_senders, rank in plan.receivers
    source = _upload(case.senders[rank].memory, device) if sends else None
    number = plan.receivers.index(rank) if receives else -1
    target = _upload(case.ranks[number].memory, device) if receives else None
    if source is None and target is not None:
        scatter_recv(plan, rank, target, transport)
    elif source is not None and target is None:
        gather_send(plan, rank, source, transport)
    shuffle = Shuffle(plan, rank, transport, source=source, target=target)
    right = [target is None or source is not None or _is(target, case.expected[number])]
    for _ in range(2):
        for tensor in (target or {}).values():
            tensor.fill_(PAD)
        started = time.perf_counter()
        shuffle.run()
        seconds = time.perf_counter() - started
        right.append(target is None or _is(target, case.expected[number]))
    return {
        "right": right,
        "seconds": seconds,
        "staging": shuffle.staging_nbytes,
        "digest": plan.digest(),
    }


def shuffle_on(
    case: str, rows: int, max_message_bytes: int, rank: int, transport: Transport, begun: Callable[[], None]
) -> None:
    """Shuffle repeatedly in host memory until a rank is lost.

    Calls `begun` once it has started.
    """
    made = make_case(case, rows)
    plan = made.plan(max_message_bytes)
    source = _upload(made.senders[rank].memory, "cpu") if rank < plan.num_senders else None
    number = plan.receivers.index(rank) if rank in plan.receivers else -1
    target = _upload(made.ranks[number].memory, "cpu") if number >= 0 else None
    shuffle = Shuffle(plan, rank, transport, source=source, target=target)
    shuffle.run()
    begun()
    while True:
        shuffle.run()


def _upload(memory: dict[str, np.ndarray], device: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(held).to(device) for name, held in memory.items()}


def _is(target: dict[str, torch.Tensor], expected: dict[str, np.ndarray]) -> bool:
    return all(torch.equal(target[name].cpu(), torch.from_numpy(held)) for name, held in expected.items())
