"""Plans tensors that are cut alike once: a model has thousands of them, of few shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from weightsync.plan.direct.direct import Reads, Reshard, in_turns
from weightsync.plan.layout.column import narrowed, repeated, row_codes
from weightsync.plan.layout.layout import Bool, Int64, Layout, columns
from weightsync.plan.layout.match import match
from weightsync.plan.layout.tensor_rows import TensorRows, firsts
from weightsync.plan.layout.trainers_layout import StatedLayout

T = TypeVar("T", "Kinds", "Places")

LEAST_ALIKE = 4
"""Tensors are planned in kinds if these have so many on average."""
MOST_TURNS = 64
"""Tensors of a kind are partitioned among so many replicas at most, to limit the time that it takes."""
_ALONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """The trainers' buffers that an engine reads, in kinds. Buffers of a kind are cut and read alike.

    Attributes:
        buffer: [U], the buffers' numbers in the source, ascending.
        kind: [U], the kind of each buffer.
        first: [K], the position in `buffer` of the first buffer of each kind.
    """

    buffer: Int64
    kind: Int64
    first: Int64

    def rows(self, reads: Reads, low: int, high: int) -> tuple[Int64, Int64]:
        """Return for each read of the buffers at `low` to `high` the read that is alike, and the buffer.

        Buffers are given by position. `reads` are from the first buffer of each kind and of one trainer,
        ordered by buffer.
        """
        kind = self.kind[np.searchsorted(self.buffer, reads.src_buffer)]
        count = np.bincount(kind, minlength=len(self.first))
        start = np.full(len(self.first), 0)
        start[kind[::-1]] = np.arange(len(kind))[::-1]  # the last assignment counts
        its = self.kind[low:high]
        unit, nth = repeated(count[its])
        return start[its[unit]] + nth, unit + low

    def partitioned(self, num_turns: int, which: Bool) -> Kinds:
        """Partition the buffers of some kinds into `num_turns` kinds, or as many as there are buffers.

        `which`: bool[K]. Other kinds stay whole.
        """
        turn = np.where(which[self.kind], self._nth() % num_turns, 0)
        kind, nth = np.unique(self.kind * num_turns + turn, return_inverse=True)
        first = np.full(len(kind), 0)
        first[nth[::-1]] = np.arange(len(nth))[::-1]
        return Kinds(self.buffer, nth, first)

    def of_turns(self, parts: Kinds) -> list[Int64]:
        """Return for each turn the first buffer of that part of each kind, by position; -1 for none.

        `parts` are these kinds, `partitioned`.
        """
        kind, nth = self.kind[parts.first], self._nth()[parts.first]
        found = np.full((int(nth.max(initial=0)) + 1, len(self.first)), -1)
        found[nth, kind] = parts.first
        return list(found)

    def _nth(self) -> Int64:
        """Return the index of each buffer within its kind."""
        order, count = np.argsort(self.kind, kind="stable"), np.bincount(self.kind)
        nth = np.empty(len(order), np.int64)
        nth[order] = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        return nth


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The places in one engine rank for the reads from each of `Kinds.buffer`.

    Attributes:
        dst_buffer: [U], the engine rank's buffer; -1 if it is the same as for the first buffer of the kind.
        shift: [U], bytes from the place of the kind's first buffer in its target.
    """

    dst_buffer: Int64
    shift: Int64


def expanded(
    reads: Reads, kinds: Kinds, places: Places | None, low: int = 0, high: int | None = None
) -> Reads:
    """Return the reads from all buffers of `reads`' kinds, or from those at `low` to `high`, in their order.

    `reads` are as in `Kinds.rows`. Without `places`, as at a sender, where they are written is not known.
    """
    row, unit = kinds.rows(reads, low, len(kinds.buffer) if high is None else high)
    return _at(reads, row, kinds, places, unit)


def _at(reads: Reads, row: Int64, kinds: Kinds, places: Places | None, unit: Int64) -> Reads:
    """Return reads number `row`, from buffer number `unit` of the kind."""
    table = reads.table(row)
    dst_buffer = reads.dst_buffer[row].astype(np.int64)
    if places:
        table[:, 1] += places.shift[unit]
        moved = places.dst_buffer[unit]
        dst_buffer = np.where(moved < 0, dst_buffer, moved)
    return Reads.from_table(
        reads.trainer[row], reads.src_names, kinds.buffer[unit], reads.dst_names, dst_buffer, table
    )


@dataclass(frozen=True, slots=True, eq=False)
class AlikeReads:
    """An engine rank's reads: those from the first buffer of each kind, from which the others follow."""

    reads: Reads
    kinds: Kinds
    places: Places

    def __len__(self) -> int:
        """Return the number of all reads."""
        return int(self._times().sum())

    def by_trainer(self) -> dict[int, int]:
        """Return the bytes read from each trainer rank."""
        return replace(self.reads, rows=self.reads.rows * self._times()).by_trainer()

    def _times(self) -> Int64:
        """Return for how many reads each one stands."""
        kind = self.kinds.kind[np.searchsorted(self.kinds.buffer, self.reads.src_buffer)]
        times: Int64 = np.bincount(self.kinds.kind)[kind]
        return times

    def whole(self) -> Reads:
        """Return all reads, by trainer."""
        order = np.argsort(self.reads.trainer, kind="stable")
        ends = np.cumsum(np.bincount(self.reads.trainer))
        parts = [self.reads.take(rows) for rows in np.split(order, ends[:-1]) if len(rows)]
        return joined([expanded(part, self.kinds, self.places) for part in parts or [self.reads]])


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """The common part of `AlikeReads` of ranks at one place in equal engines, in wire form.

    `Reads` describes the names.
    """

    kinds: Kinds
    places: Places
    src_names: tuple[str, ...]
    dst_names: tuple[str, ...]

    @classmethod
    def of(cls, reads: AlikeReads) -> Alike:
        names = reads.reads.src_names, reads.reads.dst_names
        return cls(packed(reads.kinds), packed(reads.places), *names)


@dataclass(frozen=True, slots=True, eq=False)
class LocalReads:
    """The reads of an engine rank on its host, in wire form.

    Attributes:
        parts: all reads or, in kinds, the reads from the first buffers of each kind, without names.
        first: the first trainer to read, if reads are in kinds.
    """

    parts: Sequence[Reads]
    first: int = 0

    @classmethod
    def of(cls, reads: AlikeReads, trainers: Sequence[int], first: int) -> LocalReads:
        """Take the reads from some trainer ranks."""
        its = np.flatnonzero(np.isin(reads.reads.trainer, trainers))
        return cls([replace(reads.reads.take(its), src_names=(), dst_names=())], first)

    def whole(self, alike: Alike | None) -> Sequence[Reads]:
        """Return all reads, in the order in which they run. Without `alike`, these are the parts."""
        if not alike:
            return self.parts
        named = [replace(part, src_names=alike.src_names, dst_names=alike.dst_names) for part in self.parts]
        reads = [AlikeReads(part, alike.kinds, alike.places) for part in named]
        return [in_turns(each.whole(), self.first) for each in reads]


def joined(parts: Sequence[Reads]) -> Reads:
    """Join reads of the same buffers, one part after the other."""
    names = ("trainer", "src_buffer", "dst_buffer")
    trainer, src_buffer, dst_buffer = (np.concatenate([getattr(p, name) for p in parts]) for name in names)
    table = np.concatenate([part.table() for part in parts])
    return Reads.from_table(trainer, parts[0].src_names, src_buffer, parts[0].dst_names, dst_buffer, table)


class AlikeReshard:
    """Pairs the trainers' layout with an engine's as `Reshard`, in kinds of tensors.

    Within a kind, tensors with replicas are read from different replicas, so that all replicas are busy: such
    kinds are partitioned into as many kinds as replicas.

    Attributes:
        kinds: the kinds of the trainers' buffers that are read.
        has_replicas: whether several trainer ranks hold the same box. The reads then depend on how far these
            ranks are.
    """

    def __init__(self, kinds: Kinds, sides: _Sides, reshard: Reshard, shared: Reshard) -> None:
        """`reshard` pairs the first tensors of `kinds`, `shared` the first tensors that have replicas."""
        self._reshard, self._shared = reshard, shared
        self._whole, self._whole_places = kinds, sides.places(kinds)
        self.has_replicas = reshard.most_replicas > 1
        self.kinds, self._places = kinds, self._whole_places
        if self.has_replicas:
            which = np.isin(kinds.buffer[kinds.first], reshard.shared_buffers())
            self.kinds = kinds.partitioned(min(reshard.most_replicas, MOST_TURNS), which)
            self._places = sides.places(self.kinds)
        self._firsts = kinds.of_turns(self.kinds)

    @classmethod
    def of(
        cls, trainers: StatedLayout, name: str, engine: Layout, only: frozenset[str]
    ) -> AlikeReshard | None:
        """Pair both sides, see `Reshard`. None if few tensors are alike."""
        source = trainers.stated
        matched = match(source, [(name, engine)])
        number = {meta.name: int(n) for meta, n in zip(matched.tensors, matched.source, strict=True)}
        taken = np.array([number[each] if each in only else _ALONE for each in engine.names], np.int64)
        sides = _Sides.of(source, engine, taken)
        kinds = sides.kinds()
        if len(kinds.buffer) < LEAST_ALIKE * len(kinds.first):
            return None
        listed = np.zeros(len(source.buffer_names), np.bool_)
        listed[kinds.buffer[kinds.first]] = True
        held = np.zeros(len(source.tensors), np.bool_)
        held[source.tensor[listed[source.buffer] & (source.extent > 0).all(axis=1)]] = True
        held &= np.isin(np.arange(len(held)), taken)
        found = trainers.of_tensors(held)
        reshard = Reshard(found, name, engine.of_tensors((taken >= 0) & held[taken]))
        kept = np.zeros(len(found.tensors), np.bool_)
        kept[found.tensor[np.isin(found.buffer, reshard.shared_buffers())]] = True
        if kept.all() or not kept.any():
            return cls(kinds, sides, reshard, reshard)
        held[held] = kept
        shared = Reshard(found.of_tensors(kept), name, engine.of_tensors((taken >= 0) & held[taken]))
        return cls(kinds, sides, reshard, shared)

    def reads(self, rank: int, near: Sequence[int]) -> AlikeReads:
        """Return the reads of engine rank `rank`. `near` is as in `Reshard.reads`."""
        if not self.has_replicas:
            return AlikeReads(self._reshard.reads(rank, near, start=0), self.kinds, self._places[rank])
        num_choices = min(len(self._firsts), self._shared.most_choices(rank, near))
        made = [
            self._shared.reads(rank, near, start=turn * len(near) // num_choices)
            for turn in range(num_choices)
        ]
        every = made[0] if self._shared is self._reshard else self._reshard.reads(rank, near, start=0)
        turns = [every, *(made[turn % num_choices] for turn in range(1, len(self._firsts)))]
        parts = [self._moved(*each, rank) for each in zip(turns, self._firsts, strict=True)]
        reads = joined(parts)
        order = np.lexsort((reads.src_buffer, reads.trainer))  # stable
        return AlikeReads(reads.take(order), self.kinds, self._places[rank])

    def _moved(self, reads: Reads, firsts: Int64, rank: int) -> Reads:
        """Return `reads` of the first buffers of the kinds as reads of the buffers at `firsts`."""
        kinds, places = self._whole, self._whole_places[rank]
        unit = firsts[kinds.kind[np.searchsorted(kinds.buffer, reads.src_buffer)]]
        rows = np.flatnonzero(unit >= 0)
        return _at(reads, rows, kinds, places, unit[rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """Both sides' segments, by tensor of the source.

    Attributes:
        dst_buffer, base: [num_ranks, T], an engine rank's buffer of each tensor, and the tensor's first byte
            there.
        relative: [n], bytes from that byte to each segment of the engine.
        alone: [T], tensors without a tensor alike.
        itemsize: [T].
    """

    source: TensorRows
    engine: TensorRows
    dst_buffer: Int64
    base: Int64
    relative: Int64
    alone: Bool
    itemsize: Int64

    @classmethod
    def of(cls, source: Layout, engine: Layout, taken: Int64) -> _Sides:
        num_tensors = len(source.tensors)
        times = np.bincount(taken[taken >= 0], minlength=num_tensors)
        own = np.where(times > 0, np.arange(num_tensors), _ALONE)
        held, needed = TensorRows.of(source, own, num_tensors), TensorRows.of(engine, taken, num_tensors)
        alone = times > 1
        # One buffer for a tensor, and one tensor for a buffer, on all ranks.
        alone |= _spread(held.tensor, held.buffer, num_tensors)
        shared = _spread(held.buffer, held.tensor, len(source.buffer_names))
        alone[held.tensor[shared[held.buffer]]] = True
        key = needed.rank * num_tensors + needed.tensor
        size = engine.num_ranks * num_tensors
        alone |= _spread(key, needed.buffer, size).reshape(-1, num_tensors).any(axis=0)
        dst_buffer, base = np.full(size, _ALONE), np.full(size, np.iinfo(np.int64).max)
        dst_buffer[key] = needed.buffer
        np.minimum.at(base, key, needed.byte_offset)
        relative = needed.byte_offset - base[key]
        wide = (engine.num_ranks, num_tensors)
        return cls(
            held, needed, dst_buffer.reshape(wide), base.reshape(wide), relative, alone, source.itemsize
        )

    def kinds(self) -> Kinds:
        source, engine = self.source, self.engine
        num_tensors = len(self.alone)
        codes = [source.codes([source.byte_offset]), engine.codes([self.relative])]
        code = row_codes([*codes, source.count, engine.count, self.itemsize]).astype(np.int64)
        # A tensor without a tensor alike is a kind in this comparison, and in no other.
        first = firsts(np.where(self.alone, 0, code))
        fits = (source.count == source.count[first]) & (engine.count == engine.count[first])
        first = np.where(fits & ~self.alone & ~self.alone[first], first, np.arange(num_tensors))
        differ = source.differ(first, [source.byte_offset]) | engine.differ(first, [self.relative])
        differ |= self.itemsize != self.itemsize[first]
        first = np.where(differ, np.arange(num_tensors), first)
        buffer = np.unique(source.buffer)
        tensor = np.full(int(buffer.max(initial=-1)) + 1, _ALONE)
        tensor[source.buffer] = source.tensor
        tensor = tensor[buffer]
        # Buffers of tensors without a tensor alike are numbered after all tensors: every such buffer is a
        # kind.
        label = np.where(self.alone[tensor], num_tensors + np.arange(len(buffer)), first[tensor])
        _, first, kind = np.unique(label, return_index=True, return_inverse=True)
        return Kinds(buffer, kind.astype(np.int64), first.astype(np.int64))

    def places(self, kinds: Kinds) -> list[Places]:
        """Return the places of each engine rank."""
        tensor = np.full(int(kinds.buffer.max(initial=-1)) + 1, _ALONE)
        tensor[self.source.buffer] = self.source.tensor
        its = tensor[kinds.buffer]
        first = its[kinds.first][kinds.kind]
        found = []
        for dst_buffer, base in zip(self.dst_buffer, self.base, strict=True):
            known = ~self.alone[its] & (dst_buffer[its] >= 0)
            found.append(
                Places(np.where(known, dst_buffer[its], _ALONE), np.where(known, base[its] - base[first], 0))
            )
        return found


def _spread(key: Int64, value: Int64, size: int) -> Bool:
    """Return which keys, less than `size`, come with several values."""
    one = np.zeros(size, np.int64)
    one[key] = value
    found = np.zeros(size, np.bool_)
    found[key[one[key] != value]] = True
    return found


def packed(part: T) -> T:
    """Return kinds, or places, in narrow columns, as they travel."""
    return replace(part, **{name: narrowed(column) for name, column in columns(part).items()})
