"""Divides reads from other hosts into bundles, so that shared bytes cross to a host once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.plan.broadcast.buckets import PIECE_ALIGN, align
from weightsync.plan.direct.alike import AlikeReads, Kinds
from weightsync.plan.direct.direct import Reads
from weightsync.plan.layout.column import Column, row_codes
from weightsync.plan.layout.layout import Bool, Int64

LEAST_SHARE_NBYTES = 1 << 20
"""Reads are not split into smaller shares than this, to keep messages few."""
_SAME = ("trainer", "src_buffer", "src", "rows", "row_nbytes", "src_pitch", "dst_pitch")
"""Equal columns of shared reads. Includes `dst_pitch`, since it decides how messages cut rows."""
_WHOLE = 1 << 62
_AT_ONCE = 1 << 16
"""The most reads to compare at once, few enough for a cache."""
_MASK_BITS = 62


@dataclass(frozen=True, slots=True, eq=False)
class HostBundles:
    """B bundles: reads of the same bytes by ranks of one host. A *place* is a rank's number on the host.

    Replicas, and engines with the same cut, share reads of the same bytes in the same rows. The ranks that
    share reads receive equal parts; one rank receives a small read.

    Attributes:
        trainer: int64[B], the trainer that is read, ascending.
        orders: per bundle, the places that need it. The first place receives the bundle and passes it on to
            the other places.
        count: int64[B], the number of reads at every such place.
        nbytes: int64[B], bytes that cross to the host.
        padded_nbytes: int64[B], the same bytes, with reads padded as in a message.
        rows: per place, the indices of all reads, bundle after bundle. Equal reads of several places are in
            the same order.
        start: int64[places, B], the bundle's first position in `rows`; -1 if the place has no reads of it.
        kinds: the kinds of buffers, if a read stands for the reads of all buffers of a kind.
        low, high: int64[B], with kinds, the bundle's buffers, by position in `Kinds.buffer`.
    """

    trainer: Int64
    orders: tuple[tuple[int, ...], ...]
    count: Int64
    nbytes: Int64
    padded_nbytes: Int64
    rows: tuple[Int64, ...]
    start: Int64
    kinds: Kinds | None
    low: Int64
    high: Int64

    @classmethod
    def of_alike(cls, needs: Sequence[AlikeReads]) -> HostBundles:
        """Divide the reads of places with the same kinds. All reads of a buffer go to one place."""
        kinds = needs[0].kinds
        made = cls.of([each.reads for each in needs], _WHOLE)
        shares = list(_shares(made, needs, kinds))
        of, turn, low, high, nbytes, padded_nbytes = np.array(shares, np.int64).reshape(-1, 6).T
        pairs = zip(of.tolist(), turn.tolist(), strict=True)
        return cls(
            trainer=made.trainer[of],
            orders=tuple(_rotated(made.orders[bundle], by) for bundle, by in pairs),
            count=made.count[of],
            nbytes=nbytes,
            padded_nbytes=padded_nbytes,
            rows=made.rows,
            start=made.start[:, of],
            kinds=kinds,
            low=low,
            high=high,
        )

    @classmethod
    def of(cls, needs: Sequence[Reads], least_nbytes: int = 0) -> HostBundles:
        """Divide `needs`, each place's reads from trainers on other hosts.

        `least_nbytes` is the least size of a share; by default `LEAST_SHARE_NBYTES`.
        """
        assert len({reads.src_names for reads in needs}) == 1
        least = least_nbytes or LEAST_SHARE_NBYTES
        parts = [_divide(needs, rows, least) for rows in _by_trainer(needs)]

        def joined(name: str) -> Int64:
            return np.concatenate([getattr(part, name) for part in parts])

        count, orders = joined("count"), tuple(order for part in parts for order in part.orders)
        return cls(
            trainer=joined("trainer"),
            orders=orders,
            count=count,
            nbytes=joined("nbytes"),
            padded_nbytes=joined("padded_nbytes"),
            rows=tuple(map(np.concatenate, zip(*(part.rows for part in parts), strict=True))),
            start=_starts(orders, count, len(needs)),
            kinds=None,
            low=np.zeros_like(count),
            high=np.zeros_like(count),
        )

    def of_place(self, place: int) -> Int64:
        """Return the bundles that the rank at `place` needs."""
        return np.flatnonzero(self.start[place] >= 0)

    def rows_of(self, place: int, number: int) -> Int64:
        """Return the indices of a bundle's reads for the rank at `place`."""
        start = self.start[place, number]
        return self.rows[place][start : start + self.count[number]]

    def arrivals(self, place: int, without: Collection[int] = ()) -> tuple[Counter[int], Counter[int]]:
        """Return the bytes of `place` by the trainer that is read, and by the place that passes them on.

        Bytes of the trainers `without` are left out.
        """
        packed, passed_on = Counter[int](), Counter[int]()
        its = self.of_place(place)
        its = its[~np.isin(self.trainer[its], [*without])]
        columns = (its, self.trainer[its], self.nbytes[its])
        for number, trainer, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            giver = self.orders[number][0]
            if giver == place:
                packed[trainer] += nbytes
            else:
                passed_on[giver] += nbytes
        return packed, passed_on


def _starts(orders: Sequence[tuple[int, ...]], count: Int64, num_places: int) -> Int64:
    needed = np.zeros((num_places, len(orders)), np.bool_)
    for number, order in enumerate(orders):
        needed[list(order), number] = True
    found: Int64 = np.where(needed, np.cumsum(needed * count, axis=1) - count, -1)
    return found


def _by_trainer(needs: Sequence[Reads]) -> Iterator[list[Int64]]:
    """Yield each place's reads, some trainers at a time."""
    num_trainers = 1 + max(int(reads.trainer.max(initial=-1)) for reads in needs)
    small = num_trainers <= np.iinfo(np.uint16).max  # numpy sorts uint16 much faster
    orders, ends = [], []
    for reads in needs:
        trainer = reads.trainer.astype(np.uint16) if small else reads.trainer
        orders.append(np.argsort(trainer, kind="stable"))
        ends.append(np.cumsum(np.bincount(reads.trainer, minlength=num_trainers)))
    total = np.sum(ends, axis=0)
    first = 0
    while first < num_trainers:
        before = total[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(total, before + _AT_ONCE, side="right")))
        yield [
            order[end[first - 1] if first else 0 : end[last - 1]]
            for order, end in zip(orders, ends, strict=True)
        ]
        first = last


def _shares(
    made: HostBundles, needs: Sequence[AlikeReads], kinds: Kinds
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Divide the bundles of all kinds' first buffers among the places that need them.

    Yields for each share: the bundle's number, the share's number, `low`, `high`, `nbytes`, `padded_nbytes`.
    """
    num_kinds = len(kinds.first)
    of_places = [kinds.kind[np.searchsorted(kinds.buffer, each.reads.src_buffer)] for each in needs]
    sizes = [each.reads.rows * each.reads.row_nbytes for each in needs]
    known: dict[tuple[int, bytes, bytes], list[tuple[int, int, int, int, int]]] = {}
    for number, order in enumerate(made.orders):
        place = order[0]
        rows = made.rows_of(place, number)
        kind = of_places[place][rows]
        size = sizes[place][rows]
        nbytes = np.bincount(kind, size, num_kinds).astype(np.int64)
        padded = np.bincount(kind, align(size, PIECE_ALIGN), num_kinds).astype(np.int64)
        # Most trainers have equal parts of all tensors.
        key = len(order), nbytes.tobytes(), padded.tobytes()
        if key not in known:
            known[key] = list(_shared(len(order), nbytes, padded, kinds))
        yield from ((number, *share) for share in known[key])


def _shared(
    num_places: int, nbytes: Int64, padded: Int64, kinds: Kinds
) -> Iterator[tuple[int, int, int, int, int]]:
    """Divide a bundle, with `nbytes` per buffer of a kind, or `padded` in a message, among `num_places`.

    Yields for each share: the share's number, `low`, `high`, `nbytes`, `padded_nbytes`.
    """
    times = np.bincount(kinds.kind)
    total = int((nbytes * times).sum())
    num_shares = min(num_places, max(1, total // LEAST_SHARE_NBYTES))
    if num_shares == 1:
        yield 0, 0, len(kinds.kind), total, int((padded * times).sum())
        return
    each = nbytes[kinds.kind]
    turn = (np.cumsum(each) - each) * num_shares // total
    ends = [*(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(each)]
    low = 0
    for high in ends:
        share = kinds.kind[low:high]
        if held := int(nbytes[share].sum()):
            yield int(turn[low]), low, high, held, int(padded[share].sum())
        low = high


def _divide(needs: Sequence[Reads], rows: Sequence[Int64], least_nbytes: int) -> HostBundles:
    """Divide `rows` of `needs`, given by place."""
    bounds = np.cumsum([0, *map(len, rows)])
    place = np.repeat(np.arange(len(rows)), np.diff(bounds))
    same = {
        name: np.concatenate([getattr(reads, name)[its] for reads, its in zip(needs, rows, strict=True)])
        for name in _SAME
    }
    order, starts = _equal([*same.values()], place)
    masks = _masks(place[order], starts, len(rows))
    first = order[starts]  # the lowest place's read of equal reads
    group = _codes([same["trainer"][first], *masks])
    nth = _sorted(group, first)  # by trainer and places, then as the lowest place reads them
    first, group = first[nth], group[nth]
    nbytes = same["rows"][first] * same["row_nbytes"][first]
    trainer = same["trainer"][first].astype(np.int64)
    new = np.flatnonzero(np.diff(group, prepend=-1))
    sharing = [_places(words) for words in zip(*(word[nth[new]].tolist() for word in masks), strict=True)]
    turn = _turns(nbytes, new, np.array([len(places) for places in sharing], np.int64), least_nbytes)
    begins = np.flatnonzero(np.diff(group, prepend=-1) | np.diff(turn, prepend=-1))
    which = np.searchsorted(new, begins, side="right") - 1
    orders = zip(which.tolist(), (trainer + turn)[begins].tolist(), strict=True)
    number = np.empty(len(place), np.int64)  # of each group of equal reads, in the order of bundles
    number[order] = np.repeat(_inverse(nth, len(nth)), np.diff(starts, append=len(order)))
    given = tuple(_rotated(sharing[which], by) for which, by in orders)
    count = np.diff(begins, append=len(nbytes))
    return HostBundles(
        trainer=trainer[begins],
        orders=given,
        count=count,
        nbytes=_sums(nbytes, begins),
        padded_nbytes=_sums(align(nbytes, PIECE_ALIGN), begins),
        rows=tuple(
            its[_inverse(number[start:end], len(nth))]
            for its, start, end in zip(rows, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ),
        start=_starts(given, count, len(rows)),
        kinds=None,
        low=np.zeros_like(count),
        high=np.zeros_like(count),
    )


def _equal(columns: Sequence[Column], place: Int64) -> tuple[Int64, Int64]:
    """Find equal reads of different places. Equal reads of one place stay apart.

    Returns an order in which equal reads are consecutive, by place, and the start of each run of equal reads.
    """
    bits = np.uint64(max(1, len(place) - 1).bit_length())
    code = row_codes(columns) >> bits
    found = np.sort(code << bits | np.arange(len(place), dtype=np.uint64))  # much faster than argsort
    order = (found & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    changed = _changes([column[order] for column in columns])
    if (np.diff(found >> bits) == 0)[changed[1:]].any():  # different reads have the same code
        order = np.lexsort(columns)
        changed = _changes([column[order] for column in columns])
    nth = _nth(changed | _changes([place[order]]))
    if nth.any():
        kind = np.cumsum(changed)
        again = np.lexsort((place[order], nth, kind))
        order, changed = order[again], _changes([kind[again], nth[again]])
    return order, np.flatnonzero(changed)


def _changes(columns: Sequence[Column]) -> Bool:
    """Return True for rows that differ from the row before, and for the first row."""
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = False
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def _nth(starts: Bool) -> Int64:
    """Return the index of each row within its run."""
    at = np.arange(len(starts))
    nth: Int64 = at - np.maximum.accumulate(np.where(starts, at, 0))
    return nth


def _masks(place: Int64, starts: Int64, num_places: int) -> list[Int64]:
    """Return the places of each run as bits, in as many columns as needed."""
    found = []
    for low in range(0, num_places, _MASK_BITS):
        inside = (place >= low) & (place < low + _MASK_BITS)
        bits = np.where(inside, np.int64(1) << np.where(inside, place - low, 0), 0)
        found.append(_sums(bits, starts))
    return found


def _places(masks: Sequence[int]) -> tuple[int, ...]:
    """Return the places of one row of `_masks`, ascending."""
    whole = sum(mask << (_MASK_BITS * number) for number, mask in enumerate(masks))
    return tuple(place for place in range(whole.bit_length()) if whole >> place & 1)


def _codes(columns: Sequence[Column]) -> Int64:
    """Return a number per row, equal for equal rows, in the order of rows."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, each = np.unique(column, return_inverse=True)
        code = np.unique(code * (int(each.max(initial=0)) + 1) + each, return_inverse=True)[1]
    return code


def _sorted(major: Int64, minor: Int64) -> Int64:
    """Return the order by `major`, then `minor`. Both are less than 2**31."""
    order: Int64 = np.argsort(major << 31 | minor)
    return order


def _turns(nbytes: Int64, starts: Int64, num_places: Int64, least_nbytes: int) -> Int64:
    """Return the share of each read within its run. A run has at most as many shares as places."""
    run = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(nbytes)))
    total = _sums(nbytes, starts)
    before = np.cumsum(nbytes) - nbytes
    num_shares = np.minimum(num_places, np.maximum(1, total // least_nbytes))
    turns: Int64 = (before - before[starts][run]) * num_shares[run] // total[run]
    return turns


def _rotated(places: tuple[int, ...], by: int) -> tuple[int, ...]:
    """Rotate `places`. `by` differs by trainer, so that small shares are spread."""
    at = by % len(places)
    return (*places[at:], *places[:at])


def _inverse(numbers: Int64, most: int) -> Int64:
    """Return the order of distinct `numbers` below `most`."""
    place = np.full(most, -1)
    place[numbers] = np.arange(len(numbers))
    return place[place >= 0]


def _sums(values: Int64, starts: Int64) -> Int64:
    """Return the sum of each run."""
    sums: Int64 = np.add.reduceat(values, starts) if len(starts) else np.zeros(0, np.int64)
    return sums
