"""What ranks need of other hosts, such that what several of one host need crosses to it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weightsync.plan.buffers import Int64
from weightsync.plan.copies import repeated
from weightsync.plan.reads import Reads
from weightsync.plan.shuffle import Bundle

__all__ = ["bundles"]


def bundles(needs: Mapping[int, Reads], hosts: Mapping[int, str], senders: Mapping[int, int]) -> list[Bundle]:
    """Deals `needs` to those who receive them from afar; each passes on what others of its host share.

    Reads are shared where they are of the same bytes in the same rows: replicas, and engines that are
    cut alike. Each of those who share gets an equal part of them.

    Args:
        needs: per receiving rank, what it reads of trainers on other hosts.
        hosts: of these ranks.
        senders: the rank of each trainer that is read.
    """
    found: list[Bundle] = []
    for host in sorted(set(hosts.values())):
        ranks = [rank for rank in sorted(needs) if hosts[rank] == host]
        found += _of_host([(rank, needs[rank]) for rank in ranks], senders)
    return found


def _of_host(needs: Sequence[tuple[int, Reads]], senders: Mapping[int, int]) -> list[Bundle]:
    keys = _keys([reads for _, reads in needs])
    num_keys = 1 + max(int(key.max(initial=-1)) for key in keys)
    place = np.full((len(needs), num_keys), -1)  # of each key in each rank's reads
    for number, key in enumerate(keys):
        place[number, key] = np.arange(len(key))
    wanted = np.packbits(place >= 0, axis=0).T  # by whom, a bit each
    found: list[Bundle] = []
    for first, (_, reads) in enumerate(needs):
        key = keys[first]
        key = key[(place[:first, key] < 0).all(axis=0)]  # what no earlier rank shares
        rows = place[first, key]
        trainer = reads.trainer[rows].astype(np.int64)
        kind = np.column_stack([trainer, wanted[key]])
        for group in _groups(kind):
            sharing = np.flatnonzero(place[:, key[group[0]]] >= 0).tolist()
            nbytes = reads.rows[rows[group]] * reads.row_nbytes[rows[group]]
            dealt = (np.cumsum(nbytes) - nbytes) * len(sharing) // nbytes.sum()
            for turn in np.unique(dealt).tolist():
                mine = key[group[dealt == turn]]
                order = [sharing[turn], *(each for each in sharing if each != sharing[turn])]
                parts = {needs[each][0]: needs[each][1].take(place[each, mine]) for each in order}
                found.append((senders[int(trainer[group[0]])], parts))
    return found


def _groups(rows: Int64) -> list[Int64]:
    """The numbers of equal rows, in order, those of each kind together."""
    _, kind = np.unique(rows, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    order = np.argsort(kind, kind="stable")
    return np.split(order, np.cumsum(np.bincount(kind))[:-1]) if len(rows) else []


def _keys(parts: Sequence[Reads]) -> list[Int64]:
    """A number for each read: the same for the same bytes in the same rows, however often one has them."""
    assert len({reads.src_names for reads in parts}) == 1
    code = np.zeros(sum(map(len, parts)), np.int64)
    # Where a read is cut into messages, `dst_pitch` has a say: all have to cut alike.
    for name in ("trainer", "src_buffer", "src", "rows", "row_nbytes", "src_pitch", "dst_pitch"):
        column = np.concatenate([getattr(reads, name) for reads in parts])
        code = _numbered(code * (len(column) + 1) + _numbered(column))
    owner, _ = repeated(np.array([len(reads) for reads in parts], np.int64))
    order = np.lexsort((owner, code))
    again = np.flatnonzero(np.diff(code[order] * len(parts) + owner[order], prepend=-1))
    nth = np.empty_like(code)
    nth[order] = np.arange(len(code)) - np.repeat(again, np.diff(np.append(again, len(code))))
    code = _numbered(code * (len(code) + 1) + nth)
    return np.split(code, np.cumsum([len(reads) for reads in parts])[:-1])


def _numbered(values: Int64) -> Int64:
    """Equal values get equal numbers, from 0."""
    numbers: Int64 = np.unique(values, return_inverse=True)[1].reshape(-1)
    return numbers
