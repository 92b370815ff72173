"""Plans reads from other hosts, so that shared bytes cross to a host once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.plan.copies import repeated
from weightsync.plan.direct import Reads
from weightsync.plan.layout import Bool, Int64
from weightsync.plan.shuffle import Bundle, ShufflePlan

_SAME = ("trainer", "src_buffer", "src", "rows", "row_nbytes", "src_pitch", "dst_pitch")
"""Columns that shared reads have in common; `dst_pitch` too, since messages cut rows by it."""
LEAST_SHARE_NBYTES = 1 << 20
"""Reads are not split into smaller shares than this, to keep messages few."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class CrossHostNeeds:
    """Reads from trainers on other hosts. Each member plans its messages from them.

    Attributes:
        members: the holder of each rank of the communicator. Those of trainers that are read come first.
        trainers: these trainers; number r has rank r.
        needs: per receiving rank, its reads. Ranks with equal reads should have the same object: it is sent
            and planned once.
        hosts: the host of each receiving rank.
        max_message_bytes: as in `ShufflePlan.from_layouts`.
    """

    members: tuple[int, ...]
    trainers: tuple[int, ...]
    needs: Mapping[int, Reads]
    hosts: Mapping[int, str]
    max_message_bytes: int

    def bundles(self) -> list[Bundle]:
        """Return `bundles` of these needs."""
        return bundles(self.needs, self.hosts, {trainer: r for r, trainer in enumerate(self.trainers)})

    def plan(self, rank: int) -> ShufflePlan:
        """Return the messages of `rank`: its part of the plan that all members have in common."""
        whole = ShufflePlan.from_bundles(
            self.bundles(), len(self.trainers), max_message_bytes=self.max_message_bytes, only=rank
        )
        return whole.of(rank)


def bundles(needs: Mapping[int, Reads], hosts: Mapping[int, str], senders: Mapping[int, int]) -> list[Bundle]:
    """Assign `needs` to ranks that receive them and pass them on in their host.

    Reads of the same bytes in the same rows are shared: those of replicas, and of engines with the same cut.
    The ranks that share them get equal parts; a small read goes to one of them. If the ranks of two hosts
    need the same `Reads` objects, their bundles hold the same objects, too.

    Args:
        needs: per receiving rank, its reads from trainers on other hosts.
        hosts: the host of each of these ranks.
        senders: the rank of each trainer that is read.
    """
    found: list[Bundle] = []
    of_hosts: dict[tuple[int, ...], list[Bundle]] = {}
    for host in sorted(set(hosts.values())):
        ranks = [rank for rank in sorted(needs) if hosts[rank] == host]
        same = tuple(id(needs[rank]) for rank in ranks)
        if same not in of_hosts:
            of_hosts[same] = _of_host([needs[rank] for rank in ranks])
        found += [
            (senders[trainer], {ranks[place]: reads for place, reads in parts.items()})
            for trainer, parts in of_hosts[same]
        ]
    return found


def arrivals(dealt: Sequence[Bundle]) -> dict[int, tuple[Counter[int], Counter[int]]]:
    """Return each receiving rank's bytes, by the rank that packs or forwards them."""
    same = {id(reads): reads for _, parts in dealt for reads in parts.values()}  # hosts with equal needs
    nbytes = {key: reads.nbytes for key, reads in same.items()}
    found: defaultdict[int, tuple[Counter[int], Counter[int]]] = defaultdict(lambda: (Counter(), Counter()))
    for sender, parts in dealt:
        first = next(iter(parts))
        for rank, reads in parts.items():
            packed, passed_on = found[rank]
            if rank == first:
                packed[sender] += nbytes[id(reads)]
            else:
                passed_on[first] += nbytes[id(reads)]
    return dict(found)


def _of_host(needs: Sequence[Reads]) -> list[Bundle]:
    """Return the bundles of one host: trainers, and reads by place in `needs`."""
    keys = _keys(needs)
    num_keys = 1 + max(int(key.max(initial=-1)) for key in keys)
    place = np.full((len(needs), num_keys), -1)  # of each key in each rank's reads
    for number, key in enumerate(keys):
        place[number, key] = np.arange(len(key))
    wanted = np.packbits(place >= 0, axis=0)  # a bit for each rank
    found: list[Bundle] = []
    for first, reads in enumerate(needs):
        key = keys[first]
        key = key[(place[:first, key] < 0).all(axis=0)]  # reads that no earlier rank has
        rows = place[first, key]
        trainer = reads.trainer[rows].astype(np.int64)
        for group in _groups([trainer, *wanted[:, key]]):
            sharing = np.flatnonzero(place[:, key[group[0]]] >= 0).tolist()
            nbytes = reads.rows[rows[group]] * reads.row_nbytes[rows[group]]
            giver, total = int(trainer[group[0]]), int(nbytes.sum())
            num_shares = min(len(sharing), max(1, total // LEAST_SHARE_NBYTES))
            dealt = (np.cumsum(nbytes) - nbytes) * num_shares // total
            for turn in np.unique(dealt).tolist():
                mine = key[group[dealt == turn]]
                at = (giver + turn) % len(sharing)  # rotate by trainer, so that small shares are spread
                order = [*sharing[at:], *sharing[:at]]
                found.append((giver, {each: needs[each].take(place[each, mine]) for each in order}))
    return found


def _groups(columns: Sequence[npt.NDArray[np.integer]]) -> list[Int64]:
    """Group the rows that are equal in all columns. Returns row numbers, ascending, for each group."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        code = np.unique(code * (int(column.max(initial=0)) + 1) + column, return_inverse=True)[1]
    order = np.argsort(code, kind="stable")
    return np.split(order, np.cumsum(np.bincount(code))[:-1]) if len(code) else []


def _keys(parts: Sequence[Reads]) -> list[Int64]:
    """Number the reads. Equal reads of different ranks get one number; repeats in a rank stay apart."""
    assert len({reads.src_names for reads in parts}) == 1
    columns = [np.concatenate([getattr(reads, name) for reads in parts]) for name in _SAME]
    owner, _ = repeated(np.array([len(reads) for reads in parts], np.int64))
    code = np.zeros(len(owner), np.uint64)
    for column in columns:
        code = (code + column.astype(np.uint64)) * _GOLDEN
        code ^= code >> np.uint64(32)
    order = np.lexsort((owner, code))
    changed = np.diff(code[order], prepend=code[order[:1]] - np.uint64(1)) != 0
    nth = _nth(changed | (np.diff(owner[order], prepend=-1) != 0))
    first = order[np.maximum.accumulate(np.where(changed, np.arange(len(order)), 0))]
    assert all((column[order] == column[first]).all() for column in columns), "two reads have one code"
    key = np.empty(len(code), np.int64)
    key[order] = (np.cumsum(changed) - 1) * (int(nth.max(initial=0)) + 1) + nth
    return np.split(key, np.cumsum([len(reads) for reads in parts])[:-1])


def _nth(starts: Bool) -> Int64:
    """Return each row's index in its run."""
    at = np.arange(len(starts))
    place: Int64 = at - np.maximum.accumulate(np.where(starts, at, 0))
    return place
