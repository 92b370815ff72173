"""Divides reads from other hosts among the members of the cross-host exchange."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from weightsync.plan.cross_host.cross_host import BundleTable, CrossHostTerms, ReceivingHost
from weightsync.plan.cross_host.host_bundles import HostBundles
from weightsync.plan.cross_host.shuffle import capacities
from weightsync.plan.direct.alike import AlikeReads, Kinds, Places, packed
from weightsync.plan.direct.direct import Reads
from weightsync.plan.direct.packed_reads import PackedReads
from weightsync.plan.layout.column import narrowed
from weightsync.plan.layout.layout import Int64

Needs: TypeAlias = Reads | AlikeReads


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """The reads of a host's ranks, by place, and the host's bundles.

    With kinds, `reads` only has the kinds' first buffers, and `places` has the targets of the other buffers.
    """

    reads: tuple[Reads, ...]
    places: tuple[Places, ...]
    bundles: HostBundles


def divided(needs: Sequence[Needs]) -> Divided:
    """Divide the reads of a host's ranks into bundles: in kinds if all ranks have the same kinds."""
    alike = [each for each in needs if isinstance(each, AlikeReads)]
    if len(alike) == len(needs) and len({id(each.kinds) for each in alike}) == 1:
        reads, places = tuple(each.reads for each in alike), tuple(each.places for each in alike)
        return Divided(reads, places, HostBundles.of_alike(alike))
    reads = tuple(each.whole() if isinstance(each, AlikeReads) else each for each in needs)
    return Divided(reads, (), HostBundles.of(reads))


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Hosts with equal needs: the needs as `Divided`, and each host's ranks by place.

    `near` has the trainers on each host.
    """

    needs: tuple[Reads, ...]
    places: tuple[Places, ...]
    bundles: HostBundles
    ranks: tuple[tuple[int, ...], ...]
    near: tuple[frozenset[int], ...]

    def least_near_nbytes(self) -> list[int]:
        """Return by place the bytes that do not cross hosts, on the host with the fewest of them."""
        bundles, found = self.bundles, []
        for place in range(len(self.needs)):
            its = bundles.of_place(place)
            of_trainer = np.bincount(bundles.trainer[its], bundles.padded_nbytes[its]).astype(np.int64)
            sums = (of_trainer[[t for t in near if t < len(of_trainer)]].sum() for near in self.near)
            found.append(int(min(sums)))
        return found


class CrossHostParts:
    """Reads that cross between hosts, divided among members.

    Attributes:
        terms: facts that all members know.
    """

    def __init__(
        self,
        members: Sequence[int],
        trainers: Sequence[int],
        needs: Mapping[int, Needs],
        hosts: Mapping[int, str],
        near: Mapping[str, Collection[int]],
        max_message_bytes: int,
    ) -> None:
        """Divide `needs` into bundles.

        Args:
            members: as in `CrossHostTerms`.
            trainers: the trainers that other hosts read; number r has rank r.
            needs: reads by receiving rank. Reads from trainers on the rank's host do not cross. Ranks with
                equal reads should have the same object: hosts with the same objects are of one kind, and
                planned once. Reads in kinds are planned in kinds if all ranks of a host have the same kinds.
            hosts: the host of each receiving rank.
            near: the trainers on each host, if any.
            max_message_bytes: as in `ShufflePlan.from_layouts`.

        Raises:
            ConfigError: `max_message_bytes` has no room for 256 bytes from each peer.
        """
        self._sender = np.full(max(trainers, default=-1) + 1, -1)  # rank of each trainer
        self._sender[list(trainers)] = np.arange(len(trainers))
        self._kinds = _kinds(needs, hosts, near)
        self._arrivals: dict[tuple[int, int, frozenset[int]], tuple[Counter[int], Counter[int]]] = {}
        self._capacities = _capacities(self._kinds, max_message_bytes)
        self.terms = CrossHostTerms(
            members=tuple(members),
            num_senders=len(trainers),
            max_message_bytes=max_message_bytes,
            src_names=next((kind.needs[0].src_names for kind in self._kinds), ()),
            hosts=_hosts(self._kinds, self._sender),
            kinds=_packed([kind.bundles.kinds for kind in self._kinds]),
        )

    def sent(self, rank: int) -> dict[int, BundleTable]:
        """Return the bundles that `rank` sends, by the kind of the receiving hosts."""
        found = {}
        for number, kind in enumerate(self._kinds):
            its = np.flatnonzero(self._sender[kind.bundles.trainer] == rank)
            if len(its):
                firsts = [(kind.bundles.orders[bundle][0], bundle) for bundle in its.tolist()]
                parts = [(kind.needs[place], kind.bundles.rows_of(place, each)) for place, each in firsts]
                found[number] = self._table(number, its, PackedReads.of(parts, to_send=True))
        return found

    def received(self, kind: int, place: int) -> BundleTable:
        """Return the bundles that the rank at `place` receives on hosts of `kind`."""
        its = self._kinds[kind]
        numbers = its.bundles.of_place(place)
        rows = np.concatenate([its.bundles.rows_of(place, number) for number in numbers.tolist()])
        reads = PackedReads.of([(its.needs[place], rows)])
        return self._table(kind, numbers, reads, packed(its.places[place]) if its.places else None)

    def arrivals(self, rank: int) -> tuple[Counter[int], Counter[int]]:
        """Return the bytes of `rank` by the rank that packs them, and by the rank that passes them on."""
        found = self.terms.place(rank)
        if not found:
            return Counter(), Counter()
        host, place = found
        key = host.kind, place, host.near
        if key not in self._arrivals:
            kind = self._kinds[host.kind]
            without = kind.near[next(n for n, ranks in enumerate(kind.ranks) if rank in ranks)]
            self._arrivals[key] = kind.bundles.arrivals(place, without)
        packed, passed_on = self._arrivals[key]
        return (
            Counter({int(self._sender[trainer]): nbytes for trainer, nbytes in packed.items()}),
            Counter({host.ranks[giver]: nbytes for giver, nbytes in passed_on.items()}),
        )

    def _table(
        self, kind: int, numbers: Int64, reads: PackedReads, places: Places | None = None
    ) -> BundleTable:
        bundles = self._kinds[kind].bundles
        return BundleTable(
            number=numbers,
            sender=self._sender[bundles.trainer[numbers]],
            capacity=self._capacities[kind][numbers],
            orders=tuple(bundles.orders[number] for number in numbers.tolist()),
            bounds=np.cumsum([0, *bundles.count[numbers].tolist()]),
            reads=reads,
            low=narrowed(bundles.low[numbers]),
            high=narrowed(bundles.high[numbers]),
            places=places,
        )


def _packed(kinds: Sequence[Kinds | None]) -> tuple[Kinds | None, ...]:
    """Return kinds as they travel, with one object for equal kinds."""
    known = {id(each): packed(each) for each in kinds if each}
    return tuple(known[id(each)] if each else None for each in kinds)


def _kinds(
    needs: Mapping[int, Needs], hosts: Mapping[int, str], near: Mapping[str, Collection[int]]
) -> list[_Kind]:
    on_host: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(needs):
        on_host[hosts[rank]].append(rank)
    alike: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for host, ranks in sorted(on_host.items()):
        alike[tuple(id(needs[rank]) for rank in ranks)].append(host)
    return [
        _kind(
            [needs[rank] for rank in on_host[names[0]]],
            tuple(tuple(on_host[name]) for name in names),
            tuple(frozenset(near.get(name, ())) for name in names),
        )
        for names in alike.values()
    ]


def _kind(
    needs: Sequence[Needs], ranks: tuple[tuple[int, ...], ...], near: tuple[frozenset[int], ...]
) -> _Kind:
    """Divide the needs of a host's places."""
    its = divided(needs)
    return _Kind(its.reads, its.places, its.bundles, ranks, near)


def _hosts(kinds: Sequence[_Kind], sender: Int64) -> tuple[ReceivingHost, ...]:
    """Number the bundles of all hosts. `sender` has the rank of each trainer, or -1."""
    of_hosts = [
        (number, len(kind.bundles.trainer), *host)
        for number, kind in enumerate(kinds)
        for host in zip(kind.ranks, kind.near, strict=True)
    ]
    ends = itertools.accumulate(count for _, count, _, _ in of_hosts)
    known = set(range(len(sender)))
    return tuple(
        ReceivingHost(number, end - count, ranks, frozenset(sender[[*near & known]].tolist()))
        for (number, count, ranks, near), end in zip(of_hosts, ends, strict=True)
    )


def _capacities(kinds: Sequence[_Kind], max_message_bytes: int) -> list[Int64]:
    """Return the capacities of each kind's bundles, equal on all hosts of the kind."""
    num_trainers = 1 + max((int(kind.bundles.trainer.max(initial=-1)) for kind in kinds), default=-1)
    rows: list[tuple[int, int, int]] = []  # bundle, end, times
    less = [0] * num_trainers
    number, end = 0, num_trainers
    for kind in kinds:
        stays = Counter(itertools.chain.from_iterable(kind.near))  # hosts by trainer on them
        for trainer, order in zip(kind.bundles.trainer.tolist(), kind.bundles.orders, strict=True):
            rows.append((number, trainer, len(kind.ranks) - stays[trainer]))
            rows += [(number, end + place, 1) for place in order]
            number += 1
        less += kind.least_near_nbytes()
        end += len(kind.needs)
    bundle, ends, times = np.array(rows, np.int64).reshape(-1, 3).T
    nbytes = np.concatenate([np.zeros(0, np.int64), *(kind.bundles.padded_nbytes for kind in kinds)])
    found = capacities(nbytes, bundle, ends, times, max_message_bytes, np.array(less, np.int64))
    return np.split(found, np.cumsum([len(kind.bundles.trainer) for kind in kinds])[:-1])
