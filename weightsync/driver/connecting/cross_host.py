"""Connects holders of different hosts: reads divided among them, and the messages that each plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.errors import ConfigError, PlanError
from weightsync.plan import Plan, Reads
from weightsync.plan.cross_host.cross_host_parts import CrossHostParts, Needs
from weightsync.plan.direct.alike import AlikeReads
from weightsync.plan.layout.layout import columns
from weightsync.protocol.messages import Exchange
from weightsync.protocol.peers import SharedTable, SharedTerms

_NUM_SLOTS = 4
"""Message buffers per holder: two to send from, two to receive into."""


class CrossHostExchange:
    """Messages between holders of different hosts, in one communicator.

    Attributes:
        members: the holder of each rank of the communicator; holders of trainers come first.
    """

    def __init__(
        self,
        fleet: Fleet,
        config: SyncConfig,
        plan: Plan,
        needs: Mapping[int, Needs],
        near: Mapping[str, Sequence[int]],
    ) -> None:
        """Divide `needs`, reads by holder, of which some are from other hosts. Members plan the messages.

        `near` has the trainers on each host; `plan` has staging memory, too. Raises ConfigError if
        ``sync.max_staging_bytes`` leaves no room for messages.
        """
        self._fleet, self._config, self._needs = fleet, config, dict(needs)
        self._hosts, self._near = {holder: fleet.node(holder) for holder in needs}, near
        self._trainers = _read_from_afar(
            needs, {holder: near.get(host, ()) for holder, host in self._hosts.items()}
        )
        givers = [fleet.trainers[trainer][1] for trainer in self._trainers]
        self.members = members = (*givers, *sorted(needs.keys() - set(givers)))
        self._rank = {holder: rank for rank, holder in enumerate(members)}
        staged = max((plan.staging_nbytes(holder) for holder in members), default=0)
        most = min(config.bucket_bytes, (config.max_staging_bytes - staged) // _NUM_SLOTS)
        try:
            self._parts = CrossHostParts(
                members,
                self._trainers,
                {self._rank[holder]: reads for holder, reads in needs.items()},
                {self._rank[holder]: host for holder, host in self._hosts.items()},
                near,
                most,
            )
        except ConfigError as error:
            raise ConfigError(
                "sync.max_staging_bytes",
                config.max_staging_bytes,
                f"{staged} of it are for buckets, and {_NUM_SLOTS} messages between hosts of {most} bytes "
                f"are too small: {error.remedy}",
            ) from error

    def agrees(self, holders: Collection[int], needs: Mapping[int, Needs]) -> bool:
        """Return True if the messages bring exactly the `needs` of each holder in `holders`."""
        return all(
            _same(self._needs.get(holder), needs.get(holder)) and self._stays(holder) for holder in holders
        )

    def _stays(self, holder: int) -> bool:
        """Return True if the holder has the same trainers on its host as when all connected."""
        before, now = self._hosts.get(holder, ""), self._fleet.node(holder)
        return holder not in self._needs or self._near.get(before) == self._near.get(now)

    def arrivals(self, holder: int) -> Mapping[tuple[str, int], int]:
        """Return a holder's bytes from other hosts in one update, by (sender, the sender's holder)."""
        packed, passed_on = self._parts.arrivals(self._rank.get(holder, -1))
        sent = {(f"trainer {self._trainers[rank]}", self.members[rank]): n for rank, n in packed.items()}
        return sent | {(f"holder {(at := self.members[rank])}", at): n for rank, n in passed_on.items()}

    async def open(self) -> None:
        """Have every member plan its messages and allocate memory, then open the communicator.

        Raises the errors of `connect`.
        """
        named = {f"holder {each}": self._fleet.holders[each] for each in self.members}
        terms, tables = self._share()
        takes = {
            name: holder.exchange(terms, rank, self._parts.sent(rank), tables.get(rank))
            for rank, (name, holder) in enumerate(named.items())
        }
        timeout_s = self._config.connect_timeout_s
        planned = (await gather_named(takes, "exchange", timeout_s)).require()
        _compare(planned)
        (offer,) = filter(None, (each.rendezvous for each in planned.values()))
        meets = {name: holder.meet(offer, timeout_s) for name, holder in named.items()}
        (await gather_named(meets, "meet", timeout_s + GRACE_S)).require()

    def _share(self) -> tuple[SharedTerms, dict[int, SharedTable]]:
        """Share the common terms, and one table for all ranks that receive the same."""
        parts, share = self._parts, self._fleet.share
        tables: dict[tuple[int, int], SharedTable] = {}
        received = {}
        for host in parts.terms.hosts:
            for place, rank in enumerate(host.ranks):
                if (host.kind, place) not in tables:
                    tables[host.kind, place] = SharedTable(share(parts.received(host.kind, place)))
                received[rank] = tables[host.kind, place]
        return SharedTerms(share(parts.terms)), received


def _compare(planned: Mapping[str, Exchange]) -> None:
    """Raise PlanError unless both ends of all messages planned the same. `planned` is in rank order.

    A large fleet has a million messages. If all sent messages are expected, and their numbers are equal, then
    all messages match.
    """
    names, exchanges = [*planned], [*planned.values()]
    wrong = [
        (rank, to)
        for rank, each in enumerate(exchanges)
        for to, digest in each.sent.items()
        if exchanges[to].received.get(rank) != digest
    ]
    if sum(len(each.sent) for each in exchanges) != sum(len(each.received) for each in exchanges):
        pairs = ((of, rank) for rank, each in enumerate(exchanges) for of in each.received)
        wrong += [(of, rank) for of, rank in pairs if rank not in exchanges[of].sent]
    if wrong:
        sender, receiver = (names[rank] for rank in min(wrong))
        raise PlanError(sender, f"it planned other messages to {receiver} than {receiver} expects")


def _read_from_afar(needs: Mapping[int, Needs], near: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the trainer ranks that a holder on another host reads, ascending."""
    known: dict[int, set[int]] = {}
    for each in needs.values():  # engines of equal layout have the same objects
        if id(each) not in known:
            known[id(each)] = {*trainers_of([_read(each)])}
    return sorted(set[int]().union(*(known[id(each)] - {*near[holder]} for holder, each in needs.items())))


def _read(needs: Needs) -> Reads:
    return needs.reads if isinstance(needs, AlikeReads) else needs


def _same(ours: Needs | None, theirs: Needs | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, AlikeReads) and isinstance(theirs, AlikeReads):
        pairs = [(getattr(ours, part), getattr(theirs, part)) for part in ("reads", "kinds", "places")]
    else:
        pairs = [(ours, theirs)]
    names = [(_read(each).src_names, _read(each).dst_names) for each in (ours, theirs)]
    return names[0] == names[1] and all(
        np.array_equal(one, other)
        for a, b in pairs
        for one, other in zip(columns(a).values(), columns(b).values(), strict=True)
    )


def trainers_of(parts: Sequence[Reads]) -> list[int]:
    """Return the trainer ranks that `parts` read, ascending."""
    same = {id(reads): reads for reads in parts}  # engines of equal layout have the same objects
    return sorted({trainer for reads in same.values() for trainer in np.unique(reads.trainer).tolist()})
