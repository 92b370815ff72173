"""Plans direct copies from trainers' memory into an engine's live parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from weightsync.errors import PlanError
from weightsync.plan.layout.balance import choose
from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.copies import Copies, join, stable_order, strided_copies, tiles
from weightsync.plan.layout.layout import Int32, Int64, Layout
from weightsync.plan.layout.match import Match, Shards, match


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reads(Copies):
    """N 2-D copies from the trainers' memory, in the order in which they run. `src` and `dst` are offsets.

    Attributes:
        trainer: int32[N], the rank that is read.
        src_buffer: int32[N], index into `src_names`: the buffer that `src` is an offset in.
        dst_buffer: int32[N], index into `dst_names`, as for `dst`.
    """

    trainer: Int32
    src_names: tuple[str, ...]
    src_buffer: Int32
    dst_names: tuple[str, ...]
    dst_buffer: Int32

    @classmethod
    def from_table(
        cls,
        trainer: Int64 | Int32,
        src_names: tuple[str, ...],
        src_buffer: Int64 | Int32,
        dst_names: tuple[str, ...],
        dst_buffer: Int64 | Int32,
        table: Int64,
    ) -> Reads:
        """Make reads from a table like the result of `table()`."""
        return cls(
            *table.T,
            trainer=trainer.astype(np.int32),
            src_names=src_names,
            src_buffer=src_buffer.astype(np.int32),
            dst_names=dst_names,
            dst_buffer=dst_buffer.astype(np.int32),
        )

    @classmethod
    def none(cls) -> Reads:
        """Return no reads, and no names."""
        nothing = np.zeros(0, np.int64)
        return cls.from_table(nothing, (), nothing, (), nothing, np.zeros((0, 6), np.int64))

    @property
    def nbytes(self) -> int:
        return int((self.rows * self.row_nbytes).sum())

    def by_trainer(self) -> dict[int, int]:
        """Return the bytes read from each trainer rank."""
        ranks, index = np.unique(self.trainer, return_inverse=True)
        sums = np.zeros(len(ranks), np.int64)
        np.add.at(sums, index, self.rows * self.row_nbytes)
        return dict(zip(ranks.tolist(), sums.tolist(), strict=True))

    def take(self, rows: Int64) -> Reads:
        """Return reads number `rows`, in that order."""
        return self.cut(rows, self.table(rows))

    def cut(self, part: Int64, table: Int64) -> Reads:
        """Return reads with the copies of `table`. Row i is a part of read `part[i]`."""
        return Reads.from_table(
            self.trainer[part],
            self.src_names,
            self.src_buffer[part],
            self.dst_names,
            self.dst_buffer[part],
            table,
        )

    def copies(self, src_address: Mapping[tuple[int, str], int], dst_address: Mapping[str, int]) -> Copies:
        """Return the copies between addresses.

        Args:
            src_address: start of each (trainer rank, buffer), as mapped in the process that copies.
            dst_address: start of each buffer of the engine rank.
        """
        key = self.trainer.astype(np.int64) * len(self.src_names) + self.src_buffer
        numbers, index = np.unique(key, return_inverse=True)
        starts = [
            src_address[trainer, self.src_names[buffer]]
            for trainer, buffer in (divmod(number, len(self.src_names)) for number in numbers.tolist())
        ]
        return Copies(
            np.array(starts, np.int64)[index] + self.src,
            addresses(self.dst_names, self.dst_buffer, dst_address) + self.dst,
            self.rows,
            self.row_nbytes,
            self.src_pitch,
            self.dst_pitch,
        )


def addresses(names: tuple[str, ...], buffer: Int32, address: Mapping[str, int]) -> Int64:
    """Return the address of each entry of `buffer`, an index into `names`."""
    numbers, index = np.unique(buffer, return_inverse=True)
    starts = np.array([address[names[number]] for number in numbers.tolist()], np.int64)
    found: Int64 = starts[index]
    return found


_AT_ONCE = 1 << 15
"""Boxes that are worked on at once, few enough for a cache."""
CHUNK_NBYTES = 4 << 20
"""Maximum bytes of one copy: large enough for a copy engine, small enough to alternate trainers."""


def same_dtype_tensors(source: Layout, name: str, engine: Layout) -> tuple[frozenset[str], dict[str, str]]:
    """Return engine `name`'s same-dtype tensors, and why others are left out.

    Raises:
        PlanError: the tensors of the two sides do not pair up.
    """
    matched = match(source, [(name, engine)])
    reasons = _reasons(source, matched)
    return frozenset(meta.name for meta in matched.tensors if meta.name not in reasons), reasons


def _reasons(source: Layout, matched: Match) -> dict[str, str]:
    """Return why tensors, by the engine's names, cannot be copied byte by byte."""
    pairs = zip(matched.tensors, matched.source.tolist(), strict=True)
    return {
        meta.name: f"{source.tensors[number].dtype} at the trainers, {meta.dtype} at the engine"
        for meta, number in pairs
        if source.tensors[number].dtype != meta.dtype
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Overlaps:
    """P overlaps of the sources' boxes and an engine rank's segments.

    Attributes:
        box, row: int64[P], the numbers of the box and of the segment in the engine's layout.
        low, extent: int64[P, D], in elements.
        itemsize, nbytes: int64[P].
    """

    box: Int64
    row: Int64
    low: Int64
    extent: Int64
    itemsize: Int64
    nbytes: Int64


class Reshard:
    """Pairs the trainers' layout with one engine's layout, and plans each rank's reads.

    It proves that sources tile every tensor, and that each rank's reads cover all segments of the rank. The
    caller has to prove that segments write each byte of the live parameters once, with `check_live`.
    """

    def __init__(
        self, source: Layout, name: str, engine: Layout, *, only: Collection[str] | None = None
    ) -> None:
        """Pair the two sides.

        Args:
            source: layout of the trainers.
            name: the engine's name, for messages.
            engine: layout of the engine.
            only: tensors to read directly, by the engine's names; by default all.

        Raises:
            PlanError: names a tensor that is missing or left over, of another shape or dtype, or
                that the sources do not tile.
        """
        matched = match(source, [(name, engine)])
        known = {meta.name: number for number, meta in enumerate(matched.tensors)}
        _check_only(name, known, only)
        _check_same_dtype(source, matched, only)
        self._source, self._engine = source, engine
        self._src_origin, self._dst_origin = _origin(source), _origin(engine)
        self._shards = Shards.of(source, matched)
        self._travel = np.array([known[each] for each in engine.names], np.int64)
        if only is not None:
            self._travel[[each not in only for each in engine.names]] = -1
        num_dims = max(source.offset.shape[1], engine.offset.shape[1])
        held = self._shards.first
        self._low = _wide(source.offset[held], num_dims, 0)
        self._high = self._low + _wide(source.extent[held], num_dims, 1)
        # Tensors follow each other on one line, where a tensor is as long as its first dimension. Boxes are
        # ordered by their start on the line. The running maximum of their ends ascends, too, so both can be
        # searched.
        lengths = source.shape[matched.source, 0]
        self._base = np.cumsum(lengths) - lengths
        self._begins = self._base[self._shards.tensor] + self._low[:, 0]
        self._ends = np.maximum.accumulate(self._base[self._shards.tensor] + self._high[:, 0])

    @property
    def most_replicas(self) -> int:
        """The most trainer ranks that hold the same box."""
        return int(self._shards.size.max(initial=1))

    def shared_buffers(self) -> Int64:
        """Return the numbers of the source's buffers that have a box which several trainer ranks hold."""
        shards = self._shards
        found: Int64 = np.unique(self._source.buffer[shards.rows[np.repeat(shards.size > 1, shards.size)]])
        return found

    def most_choices(self, rank: int, near: Sequence[int]) -> int:
        """Return among how many equally near replicas `reads` chooses, at most."""
        rows = self._segments(rank)
        box = np.concatenate(
            [np.zeros(0, np.int64), *(self._overlaps(part).box for part in self._blocks(rows))]
        )
        if (self._shards.size[box] == 1).all():
            return 1
        overlap, _, _ = self._nearest(box, np.asarray(near, np.int64))
        return int(np.bincount(overlap).max())

    def reads(self, rank: int, near: Sequence[int], *, start: int | None = None) -> Reads:
        """Return the reads of engine rank `rank`: every byte of the rank's segments once.

        Args:
            near: distance of each trainer rank: 0 the same device, 1 the same host, 2 another host. The
                nearest of several replicas is read; bytes are balanced among equally near replicas.
            start: the trainer rank that is read first. By default the engine's ranks are spread over the
                trainers; with several engines, spread the ranks of all engines.
        """
        source, engine = self._source, self._engine
        start = rank * source.num_ranks // engine.num_ranks if start is None else start
        assert len(near) == source.num_ranks, (len(near), source.num_ranks)
        blocks = self._blocks(self._segments(rank))
        parts = [self._overlaps(rows) for rows in blocks]
        held = self._pick(
            np.concatenate([part.box for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
            start,
            np.asarray(near, np.int64),
        )
        ends = np.cumsum([len(part.box) for part in parts])[:-1]
        made = [self._copies(*each) for each in zip(parts, np.split(held, ends), strict=True)]
        lane, table = (np.concatenate(each) for each in zip(*made, strict=True))
        by_lane = stable_order(lane)  # blocks have no lane in common
        num_src, num_dst = len(source.buffer_names), len(engine.buffer_names)
        lane, nbytes = lane[by_lane], (table[:, 2] * table[:, 3])[by_lane]
        trainer, buffers = np.divmod(lane, num_src * num_dst)
        first = near.index(0) + 1 if 0 in near else start
        order = _read_order(trainer, nbytes, first, source.num_ranks)
        rows, (src_buffer, dst_buffer) = by_lane[order], np.divmod(buffers[order], num_dst)
        return Reads(
            *(column[rows] for column in table.T),
            trainer=trainer[order].astype(np.int32),
            src_names=source.buffer_names,
            src_buffer=src_buffer.astype(np.int32),
            dst_names=engine.buffer_names,
            dst_buffer=dst_buffer.astype(np.int32),
        )

    def _segments(self, rank: int) -> Int64:
        """Return the rows of the engine's layout that `rank` fills directly."""
        engine = self._engine
        rows = np.arange(*np.searchsorted(engine.rank, [rank, rank + 1]).tolist())
        wanted = (engine.extent[rows] > 0).all(axis=1) & (self._travel[engine.tensor[rows]] >= 0)
        found: Int64 = rows[wanted]
        return found

    def _blocks(self, rows: Int64) -> list[Int64]:
        """Split `rows` into blocks small enough for a cache. Segments of one buffer stay in one block."""
        buffer = self._engine.buffer[rows]
        last = np.zeros(len(self._engine.buffer_names), np.int64)
        last[buffer] = np.arange(len(rows))
        ends = np.flatnonzero(np.maximum.accumulate(last[buffer]) == np.arange(len(rows))) + 1
        first, stop, _, _ = self._boxes(rows)
        done = np.cumsum(stop - first)
        return np.split(rows, ends[:-1][np.diff(done[ends - 1] // _AT_ONCE) > 0])

    def _boxes(self, rows: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """Return each segment's first box and the end, and the segment's offset and extent, [n, D]."""
        engine, num_dims = self._engine, self._low.shape[1]
        low = _wide(engine.offset[rows], num_dims, 0)
        extent = _wide(engine.extent[rows], num_dims, 1)
        base = self._base[self._travel[engine.tensor[rows]]]
        first = np.searchsorted(self._ends, base + low[:, 0], side="right")
        stop = np.searchsorted(self._begins, base + low[:, 0] + extent[:, 0], side="left")
        return first, stop, low, extent

    def _overlaps(self, rows: Int64) -> _Overlaps:
        """Find the overlaps of boxes and segments."""
        engine = self._engine
        first, stop, low, extent = self._boxes(rows)
        high = low + extent
        segment, nth = repeated(stop - first)
        box = first[segment] + nth
        begin = np.maximum(low[segment], self._low[box])
        common = np.minimum(high[segment], self._high[box]) - begin
        kept = np.flatnonzero(reduce(np.logical_and, common.T > 0))
        box, segment, begin, common = box[kept], segment[kept], begin[kept], common[kept]
        covered = np.bincount(segment, _numel(common), len(rows))
        assert (covered == _numel(extent)).all(), "sources tile every tensor, so they cover a segment"
        row = rows[segment]
        itemsize = engine.itemsize[engine.tensor[row]]
        return _Overlaps(box, row, begin, common, itemsize, _numel(common) * itemsize)

    def _copies(self, overlaps: _Overlaps, held: Int64) -> tuple[Int64, Int64]:
        """Return copies of `overlaps` from the rows `held` of the source's layout, and their lanes.

        A lane is a number for a trainer, the trainer's buffer and the engine's buffer. Copies are ordered by
        lane.
        """
        source, engine, row, low = self._source, self._engine, overlaps.row, overlaps.low
        src_strides = _wide(source.strides[held], low.shape[1], 0)
        dst_strides = _wide(engine.strides[row], low.shape[1], 0)
        src = self._src_origin[held] + np.einsum("nd,nd->n", low, src_strides)
        dst = self._dst_origin[row] + np.einsum("nd,nd->n", low, dst_strides)
        table, part = strided_copies(overlaps.extent, overlaps.itemsize, src, dst, src_strides, dst_strides)
        num_src, num_dst = len(source.buffer_names), len(engine.buffer_names)
        lane = (source.rank[held].astype(np.int64) * num_src + source.buffer[held]) * num_dst
        lane, table = join((lane + engine.buffer[row])[part], table)
        table, part = tiles(Copies(*table.T), CHUNK_NBYTES)
        return lane[part], table

    def _pick(self, box: Int64, nbytes: Int64, start: int, near: Int64) -> Int64:
        """Choose the row of the source's layout from which each overlap is read."""
        shards, num_ranks = self._shards, self._source.num_ranks
        if (shards.size[box] == 1).all():
            return shards.first[box]
        overlap, rows, trainer = self._nearest(box, near)
        # Receivers with equal needs start at different trainers, so together they load all of them equally.
        turned = (trainer - start) % num_ranks
        order = np.argsort(overlap * num_ranks + turned)
        rows, turned = rows[order], turned[order]
        size = np.bincount(overlap, minlength=len(box))
        picked: Int64 = rows[choose(np.cumsum(size) - size, size, turned, nbytes, num_ranks)]
        return picked

    def _nearest(self, box: Int64, near: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the nearest replicas of each box: the box's number, the source's row, the trainer."""
        shards, size = self._shards, self._shards.size[box]
        number, nth = repeated(size)
        rows = shards.rows[shards.start[box[number]] + nth]
        trainer = self._source.rank[rows].astype(np.int64)
        kept = near[trainer] == np.minimum.reduceat(near[trainer], np.cumsum(size) - size)[number]
        return number[kept], rows[kept], trainer[kept]


def _origin(layout: Layout) -> Int64:
    """Return the byte offset of the whole tensor's element 0 in each buffer, int64[n]."""
    origin: Int64 = layout.byte_offset - np.einsum("nd,nd->n", layout.offset, layout.strides)
    return origin


def in_turns(reads: Reads, first: int) -> Reads:
    """Return `reads`, which are ordered by trainer, in the order of `Reshard.reads`."""
    trainer = reads.trainer.astype(np.int64)
    most = max(first, int(trainer.max(initial=0)))
    return reads.take(_read_order(trainer, reads.rows * reads.row_nbytes, first, most + 1))


def _read_order(trainer: Int64, nbytes: Int64, first: int, num_trainers: int) -> Int64:
    """Return the order of the copies; `trainer` ascends.

    Copies run in rounds. In each round every trainer sends the same fraction of its bytes, so all trainers
    are busy until the end. A receiver starts each round with trainer `first`, which is the trainer after the
    one on its own device, if any. So receivers read from different trainers at any time.
    """
    total = np.bincount(trainer, nbytes, num_trainers).astype(np.int64)
    before = np.cumsum(nbytes) - nbytes - (np.cumsum(total) - total)[trainer]
    num_rounds = -(-int(total.max(initial=0)) // CHUNK_NBYTES)
    turn = before * num_rounds // total[trainer]
    return stable_order(turn * num_trainers + (trainer - first) % num_trainers)


def _numel(extent: Int64) -> Int64:
    """Return the elements per box, int64[n]; for few columns much faster than `prod(axis=1)`."""
    numel: Int64 = reduce(np.multiply, extent.T)
    return numel


def _wide(columns: Int64, num_dims: int, fill: int) -> Int64:
    """Pad `columns`, int64[n, d], to `num_dims` dimensions with `fill`."""
    missing = num_dims - columns.shape[1]
    if not missing:
        return columns
    return np.hstack([columns, np.full((len(columns), missing), fill, np.int64)])


def _check_only(name: str, known: Collection[str], only: Collection[str] | None) -> None:
    unknown = sorted(set(only or ()) - set(known))
    if unknown:
        raise PlanError(unknown[0], f"to be sent directly, but engine {name} takes no such tensor")


def _check_same_dtype(source: Layout, matched: Match, only: Collection[str] | None) -> None:
    for name, reason in _reasons(source, matched).items():
        if only is None or name in only:
            raise PlanError(name, f"{reason}; bytes are copied, not cast: send it by broadcast")
