"""The shared terms of the cross-host exchange, and the messages that members plan from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.plan.cross_host.shuffle import Lane, Messages, ShufflePlan, bundle_messages, in_order
from weightsync.plan.direct.alike import Kinds, Places, expanded
from weightsync.plan.direct.direct import Reads
from weightsync.plan.direct.packed_reads import PackedReads
from weightsync.plan.layout.column import Column
from weightsync.plan.layout.layout import Int64

_ALIKE = ("src", "rows", "row_nbytes", "src_pitch", "dst_pitch", "src_buffer", "dst_buffer")
"""All columns of reads except the trainer, and the places in target buffers."""


class AlikeMessages:
    """The messages of one receiver's bundles, for reads in kinds.

    Trainers with equal parts of all tensors, as with FSDP, send the receiver the same messages. Only the
    places where the receiver writes them differ.
    """

    def __init__(self, kinds: Kinds, places: Places | None) -> None:
        """`kinds` and `places` are the arguments of `expanded`."""
        self._kinds, self._places = kinds, places
        self._known: dict[tuple[int | bytes, ...], tuple[Reads, Messages, Int64]] = {}

    def of(self, reads: Reads, low: int, high: int, capacity: int) -> Messages:
        """Return the messages of a bundle's reads from one trainer.

        The arguments are those of `expanded` and `bundle_messages`.
        """
        key = (low, high, capacity, *(getattr(reads, name).tobytes() for name in _ALIKE))
        if key not in self._known:
            made = bundle_messages(expanded(reads, self._kinds, self._places, low, high), capacity)
            row, _ = self._kinds.rows(reads, low, high)
            self._known[key] = reads, made, row[made.origin]
            return made
        first, made, row = self._known[key]
        return made.moved(int(reads.trainer[0]), (reads.dst - first.dst)[row])


@dataclass(frozen=True, slots=True)
class ReceivingHost:
    """A host that receives data from other hosts.

    Attributes:
        kind: number of the host's kind. Hosts of one kind need the same data.
        first: number of the host's first bundle.
        ranks: the communicator's ranks on this host, by place.
        near: the ranks that send from this host. Their bundles do not cross to the host.
    """

    kind: int
    first: int
    ranks: tuple[int, ...]
    near: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class BundleTable:
    """A member's bundles for one kind of host, in columns.

    Attributes:
        number: int64[n], the bundle's number on the host.
        sender: int64[n], the rank that packs the bundle; -1 if the bundle crosses to no host.
        capacity: int64[n], the most bytes of one message of the bundle.
        orders: the places that need the bundle, as in `HostBundles`.
        bounds: int64[n + 1], the bundle's first row of `reads`.
        reads: the member's reads. A sender has the reads of the first place, without the places where the
            receiver writes them. With kinds, only the reads of the kinds' first buffers.
        low, high: int[n], as in `HostBundles`.
        places: with kinds, the places where the member writes the reads of the other buffers.
    """

    number: Int64
    sender: Int64
    capacity: Int64
    orders: tuple[tuple[int, ...], ...]
    bounds: Int64
    reads: PackedReads
    low: Column
    high: Column
    places: Places | None

    def lanes(
        self, hosts: Sequence[ReceivingHost], rank: int, src_names: tuple[str, ...], kinds: Kinds | None
    ) -> Iterator[Lane]:
        """Yield the messages between `rank` and `hosts` of this kind."""
        reads = self.reads.reads(src_names)
        known = AlikeMessages(kinds, self.places) if kinds else None
        for n, (number, sender, order) in enumerate(
            zip(self.number.tolist(), self.sender.tolist(), self.orders, strict=True)
        ):
            takers = [host for host in hosts if sender >= 0 and sender not in host.near]
            if not takers:
                continue
            part, capacity = reads.take(np.arange(*self.bounds[n : n + 2])), int(self.capacity[n])
            if known:
                messages = known.of(part, int(self.low[n]), int(self.high[n]), capacity)
            else:
                messages = bundle_messages(part, capacity)
            for host in takers:
                first, *others = (host.ranks[place] for place in order)
                for giver, taker in ((sender, first), *((first, other) for other in others)):
                    if rank in (giver, taker):
                        yield Lane(giver, taker, messages, host.first + number, int(giver != sender))


@dataclass(frozen=True, slots=True, eq=False)
class CrossHostTerms:
    """Facts that all members of the exchange know.

    Attributes:
        members: the holder of each rank of the communicator. Holders of trainers that send come first.
        num_senders: the number of trainers that send.
        max_message_bytes: as in `ShufflePlan.from_layouts`.
        src_names: the trainers' buffers.
        hosts: the receiving hosts.
        kinds: by kind of host, the kinds of buffers that the hosts read; None if buffers are not in kinds.
    """

    members: tuple[int, ...]
    num_senders: int
    max_message_bytes: int
    src_names: tuple[str, ...]
    hosts: tuple[ReceivingHost, ...]
    kinds: tuple[Kinds | None, ...]

    def place(self, rank: int) -> tuple[ReceivingHost, int] | None:
        """Return the host where `rank` receives, and the place there. None if `rank` only sends."""
        return next(((host, host.ranks.index(rank)) for host in self.hosts if rank in host.ranks), None)

    def plan(self, rank: int, sent: Mapping[int, BundleTable], received: BundleTable | None) -> ShufflePlan:
        """Return the messages of `rank`, a part of the plan that all members share.

        Args:
            rank: number of the member.
            sent: the bundles that the member sends, by the kind of the receiving hosts.
            received: the bundles that the member receives.
        """
        lanes: list[Lane] = []
        for kind, table in sorted(sent.items()):
            hosts = [host for host in self.hosts if host.kind == kind]
            lanes += table.lanes(hosts, rank, self.src_names, self.kinds[kind])
        if received and (found := self.place(rank)):
            lanes += received.lanes(found[:1], rank, self.src_names, self.kinds[found[0].kind])
        return ShufflePlan(
            num_senders=self.num_senders,
            receivers=tuple(sorted({lane.receiver for lane in lanes})),
            max_message_bytes=self.max_message_bytes,
            lanes=in_order(lanes),
            local=(),
        )
