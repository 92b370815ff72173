"""Plans messages between ranks that change one layout into another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from weightsync.errors import ConfigError, PlanError
from weightsync.plan.broadcast.buckets import PIECE_ALIGN, RUN_ALIGN, align, arrange, cut
from weightsync.plan.direct.direct import Reads, Reshard
from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.copies import Copies, tiles
from weightsync.plan.layout.coverage import check_live
from weightsync.plan.layout.layout import Int64, Layout, columns
from weightsync.plan.layout.segment import RankLayout

_SMALL = 64 << 10
"""Bundles of at most this many bytes travel in one message, if there is room."""
_PARTS = 8
"""A piece is at most a message's size divided by this, so that messages are filled well."""


_DST = ("dst", "dst_buffer")
"""Columns that only the receiver has. Senders have `dst_pitch`, which decides how reads are cut."""

Bundle = tuple[int, Mapping[int, Reads]]
"""A sender, and reads of the same bytes by receiver. The first receiver passes the bytes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The messages from one rank to another. Message k is sent in round ``hop + k``.

    Attributes:
        bundle: lanes of the same number carry the same bytes.
        hop: 0 if the sender packs the messages, 1 if it passes on bytes received in the round before.
    """

    sender: int
    receiver: int
    messages: Messages
    bundle: int
    hop: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShufflePlan:
    """Messages between the ranks of a transport, in rounds. Every rank makes the same plan.

    Ranks are ranks of the transport. Rank s of the source is rank s; rank t of the target is
    ``receivers[t]``.

    Attributes:
        num_senders: number of ranks of the source.
        receivers: the transport's rank of each rank of the target.
        max_message_bytes: the most bytes that one rank packs, or receives, in a round.
        lanes: messages between two different ranks, with one lane per pair and payload.
        local: pairs of a rank that sends and receives, and the rank's copies to itself.
    """

    num_senders: int
    receivers: tuple[int, ...]
    max_message_bytes: int
    lanes: tuple[Lane, ...]
    local: tuple[tuple[int, Reads], ...]

    @classmethod
    def from_layouts(
        cls,
        source: Layout | Sequence[RankLayout],
        target: Layout | Sequence[RankLayout],
        *,
        max_message_bytes: int,
        receivers: Sequence[int] | None = None,
    ) -> ShufflePlan:
        """Plan for every byte of the target a source rank that holds the byte.

        If several source ranks hold the same bytes, the receiver itself is preferred; among other ranks the
        bytes are balanced.

        Args:
            source: layout of the sending ranks.
            target: layout of the receiving ranks. If the layout declares live buffers, this proves that
                every byte of the buffers is written once.
            max_message_bytes: the most bytes of one round on each side; staging memory is twice this.
            receivers: the transport's rank of each target rank. By default receivers follow the senders; give
                ``range(len(target))`` if the same ranks send and receive.

        Raises:
            PlanError: names a tensor that is missing or left over, of another shape or dtype on the
                two sides, or that the source does not tile; or a live buffer with a hole or overlap.
            ConfigError: `receivers` do not fit, or `max_message_bytes` has no room for 256 bytes
                from each peer.
        """
        source = source if isinstance(source, Layout) else Layout.from_ranks(source)
        target = target if isinstance(target, Layout) else Layout.from_ranks(target)
        given = range(source.num_ranks, source.num_ranks + target.num_ranks)
        ranks = tuple(given if receivers is None else receivers)
        _check_receivers(ranks, target.num_ranks)
        check_live("target", target)
        bundles, local = _parts(source, target, ranks)
        return cls(
            num_senders=source.num_ranks,
            receivers=ranks,
            max_message_bytes=max_message_bytes,
            lanes=_lanes(bundles, max_message_bytes),
            local=local,
        )

    @classmethod
    def from_bundles(
        cls, bundles: Sequence[Bundle], num_senders: int, *, max_message_bytes: int
    ) -> ShufflePlan:
        """Plan messages whose senders and receivers are known already.

        Args:
            bundles: pairs of a sender and, by receiver, the reads of the same bytes.
            num_senders: number of ranks of the source.
            max_message_bytes: as in `from_layouts`.

        Raises:
            ConfigError: `max_message_bytes` has no room for 256 bytes from each peer.
        """
        return cls(
            num_senders=num_senders,
            receivers=tuple(sorted({rank for _, reads in bundles for rank in reads})),
            max_message_bytes=max_message_bytes,
            lanes=_lanes(bundles, max_message_bytes),
            local=(),
        )

    @property
    def num_ranks(self) -> int:
        """The fewest ranks that a transport must have."""
        return max(self.num_senders, *(rank + 1 for rank in self.receivers))

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return max((lane.hop + lane.messages.num_rounds for lane in self.lanes), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that are sent, without local copies."""
        return sum(lane.messages.reads.nbytes for lane in self.lanes)

    def sends(self, rank: int) -> tuple[Lane, ...]:
        """Return the lanes that `rank` sends."""
        return tuple(lane for lane in self.lanes if lane.sender == rank)

    def receives(self, rank: int) -> tuple[Lane, ...]:
        """Return the lanes that `rank` receives."""
        return tuple(lane for lane in self.lanes if lane.receiver == rank)

    def of(self, rank: int) -> ShufflePlan:
        """Return the part of the plan that `rank` needs."""
        local = tuple(each for each in self.local if each[0] == rank)
        return replace(self, lanes=(*self.sends(rank), *self.receives(rank)), local=local)

    def digests(self, rank: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return digests of the messages from `rank` to other ranks, and from other ranks to `rank`.

        Two ranks plan the same messages if the first rank's digest for the second, in the first result,
        equals the second rank's digest for the first, in the second result. A digest is half of a SHA-256,
        without the receiver's target places, which the sender does not know.
        """
        header = json.dumps([self.num_senders, self.max_message_bytes]).encode()
        sent = _digests(header, ((lane.receiver, lane) for lane in self.sends(rank)))
        return sent, _digests(header, ((lane.sender, lane) for lane in self.receives(rank)))

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of everything that the ranks must agree on."""
        header = {
            "senders": self.num_senders,
            "receivers": self.receivers,
            "max_message_bytes": self.max_message_bytes,
            "lanes": [(lane.sender, lane.receiver, lane.bundle, lane.hop) for lane in self.lanes],
            "local": [rank for rank, _ in self.local],
        }
        state = hashlib.sha256(json.dumps(header).encode())
        for lane in self.lanes:
            _hash_messages(state, lane.messages)
            state.update(_names(lane.messages.reads))
        for _, reads in self.local:
            _hash_reads(state, reads)
            state.update(_names(reads))
        return state.hexdigest()


def _check_receivers(ranks: tuple[int, ...], num_ranks: int) -> None:
    if len(ranks) != num_ranks or len(set(ranks)) != len(ranks) or min(ranks, default=0) < 0:
        remedy = f"give one rank of the transport, 0 or more, for each of the {num_ranks} target ranks"
        raise ConfigError("receivers", ranks, remedy)
    if not ranks:
        raise PlanError("target", "no rank receives; give the layout of at least one")


def _parts(
    source: Layout, target: Layout, ranks: tuple[int, ...]
) -> tuple[list[Bundle], tuple[tuple[int, Reads], ...]]:
    """Return reads between ranks as bundles, and each rank's reads from itself."""
    reshard = Reshard(source, "target", target)
    parts, local = {}, []
    for number, receiver in enumerate(ranks):
        near = [int(sender != receiver) for sender in range(source.num_ranks)]
        reads = reshard.reads(number, near)
        for sender in np.unique(reads.trainer).tolist():
            part = reads.take(np.flatnonzero(reads.trainer == sender))
            if sender == receiver:
                local.append((receiver, part))
            else:
                parts[sender, receiver] = part
    ordered = sorted(parts.items(), key=itemgetter(0))
    bundles: list[Bundle] = [(sender, {to: part}) for (sender, to), part in ordered]
    return bundles, tuple(sorted(local, key=itemgetter(0)))


def capacities(
    nbytes: Int64, bundle: Int64, end: Int64, times: Int64, max_message_bytes: int, less: Int64 | None = None
) -> Int64:
    """Return the largest message size of each bundle, in bytes.

    A bundle's share of a round is its share of the busiest end's bytes. So lanes of one bottleneck end
    together, and a round's bytes fit on both sides.

    Args:
        nbytes: int64[B], bytes of each bundle, with each read padded to `PIECE_ALIGN`.
        bundle: int64[M], ascending; a bundle's ends follow each other. A bundle has at least one end.
        end: int64[M], numbers of ends: a rank that packs, or a rank that receives.
        times: int64[M], how many bundles like this bundle the end has.
        less: by end, bytes of the end's bundles that are never sent together with the other bundles.

    Raises:
        ConfigError: `max_message_bytes` has no room for 256 bytes of each bundle of one end.
    """
    most = int(np.bincount(end, times).max(initial=1))
    if max_message_bytes < RUN_ALIGN * most:
        raise ConfigError("max_message_bytes", max_message_bytes, f"give at least {RUN_ALIGN * most}")
    least = max(RUN_ALIGN, min(_SMALL, max_message_bytes // 4 // most) // RUN_ALIGN * RUN_ALIGN)
    shared = max_message_bytes - least * most
    total = np.bincount(end, nbytes[bundle] * times).astype(np.int64)
    if less is not None:
        total -= less[: len(total)]
    starts = np.flatnonzero(np.diff(bundle, prepend=-1))
    busiest = np.maximum(np.maximum.reduceat(total[end], starts) if len(starts) else total[:0], 1)
    # The bytes of a bundle times the bytes of a round need more than 63 bits for bundles of tens of GB.
    shift = max(0, int(nbytes.max(initial=0)).bit_length() + shared.bit_length() - 62)
    part, whole = nbytes >> shift, -(-busiest >> shift)
    found: Int64 = (least + shared * part // whole) // RUN_ALIGN * RUN_ALIGN
    return found


def bundle_messages(reads: Reads, capacity: int) -> Messages:
    """Cut the reads of one bundle into messages of at most `capacity` bytes."""
    piece = max(RUN_ALIGN, capacity // _PARTS // RUN_ALIGN * RUN_ALIGN)
    table, part = tiles(reads, piece)
    moved = messages(reads.cut(part, table), capacity)
    return replace(moved, origin=part[moved.origin])


def _lanes(bundles: Sequence[Bundle], max_message_bytes: int) -> tuple[Lane, ...]:
    """Cut bundles into lanes. Bundles with the same `Reads` object share messages."""
    firsts = [next(iter(parts.values())) for _, parts in bundles]
    sizes = [int(align(part.rows * part.row_nbytes, PIECE_ALIGN).sum()) for part in firsts]
    numbers: dict[tuple[str, int], int] = {}
    ends = [
        (number, numbers.setdefault(end, len(numbers)), 1)
        for number, bundle in enumerate(bundles)
        for end in _ends(bundle)
    ]
    bundle, end, times = np.array(ends, np.int64).reshape(-1, 3).T
    shares = capacities(np.array(sizes, np.int64), bundle, end, times, max_message_bytes)
    lanes = []
    made: dict[tuple[int, int], Messages] = {}
    for number, ((sender, parts), capacity) in enumerate(zip(bundles, shares.tolist(), strict=True)):
        first = next(iter(parts))
        for rank, part in parts.items():
            hop = int(rank != first)
            if (key := (id(part), capacity)) not in made:
                made[key] = bundle_messages(part, capacity)
            lanes.append(Lane(first if hop else sender, rank, made[key], number, hop))
    return in_order(lanes)


def in_order(lanes: Iterable[Lane]) -> tuple[Lane, ...]:
    """Return `lanes` in sending order: between two ranks, messages arrive in this order."""
    return tuple(sorted(lanes, key=lambda lane: lane.hop))


def _ends(bundle: Bundle) -> list[tuple[str, int]]:
    sender, reads = bundle
    return [("packs", sender), *(("receives", rank) for rank in reads)]


def _digests(header: bytes, lanes: Iterable[tuple[int, Lane]]) -> dict[int, bytes]:
    """Return by peer the first 16 bytes of a SHA-256 of `header` and the peer's `lanes`, in order."""
    states: dict[int, hashlib._Hash] = {}
    known: dict[int, bytes] = {}  # digests of names, and of messages that differ only in trainer and place
    for peer, lane in lanes:
        moved, names = lane.messages, lane.messages.reads.src_names
        state = states.setdefault(peer, hashlib.sha256(header))
        state.update(json.dumps([lane.bundle, lane.hop, moved.trainer[:1].tolist()]).encode())
        if (key := id(moved.wire)) not in known:
            each = hashlib.sha256()
            _hash_messages(each, moved, ("trainer", *_DST))
            known[key] = each.digest()
        if id(names) not in known:
            known[id(names)] = hashlib.sha256(json.dumps(names).encode()).digest()
        state.update(known[key] + known[id(names)])
    return {peer: state.digest()[:16] for peer, state in states.items()}


def _hash_messages(state: hashlib._Hash, moved: Messages, without: Collection[str] = ()) -> None:
    for column in (moved.round, moved.offset, moved.nbytes, moved.bounds, moved.wire):
        state.update(np.ascontiguousarray(column).tobytes())
    _hash_reads(state, moved.reads, without)


def _hash_reads(state: hashlib._Hash, reads: Reads, without: Collection[str] = ()) -> None:
    for name, column in columns(reads).items():
        if name not in without:
            state.update(np.ascontiguousarray(column).tobytes())


def _names(reads: Reads) -> bytes:
    return json.dumps([reads.src_names, reads.dst_names]).encode()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Messages:
    """M messages to one receiver, ordered by round, then by trainer.

    A round's messages are consecutive in the receive buffer; the next round may overwrite them.

    Attributes:
        round, trainer, offset, nbytes: int64[M]; offset is in the receive buffer, a multiple of 256.
        bounds: int64[M + 1], the message's first row of `reads`.
        reads: the copies that are packed and unpacked, in the messages' order.
        wire: int64[N], the start of each read in its message, without gaps between rows.
        origin: int64[N], the index of the given read from which each read was cut.
    """

    round: Int64
    trainer: Int64
    offset: Int64
    nbytes: Int64
    bounds: Int64
    reads: Reads
    wire: Int64
    origin: Int64

    @property
    def num_rounds(self) -> int:
        return int(self.round[-1]) + 1 if len(self.round) else 0

    def of(self, round: int) -> range:
        """Return the numbers of the messages of one round."""
        return range(*np.searchsorted(self.round, [round, round + 1]).tolist())

    def moved(self, trainer: int, shift: Int64) -> Messages:
        """Return these messages for another trainer and other places.

        `shift` has the bytes from the old place of each read to the new place: int64[N].
        """
        reads = replace(
            self.reads,
            trainer=np.broadcast_to(np.int32(trainer), len(self.reads)),
            dst=self.reads.dst + shift,
        )
        return replace(self, trainer=np.broadcast_to(np.int64(trainer), len(self.trainer)), reads=reads)

    def pack(self, message: int, start: Int64, wire: int) -> Copies:
        """Return the trainer's copies that fill `message`, at address `wire` of the trainer's memory.

        `start` has the addresses of ``reads.src_names``.
        """
        reads, these = self.reads, slice(*self.bounds[message : message + 2].tolist())
        return Copies(
            start[reads.src_buffer[these]] + reads.src[these],
            wire + self.wire[these],
            reads.rows[these],
            reads.row_nbytes[these],
            reads.src_pitch[these],
            reads.row_nbytes[these],
        )

    def unpack(self, round: int, wire: int, start: Int64) -> Copies:
        """Return the receiver's copies out of a round in the receive buffer at address `wire`.

        `start` has the addresses of ``reads.dst_names``.
        """
        numbers = self.of(round)
        bounds = self.bounds[numbers.start : numbers.stop + 1]
        reads, these = self.reads, slice(*bounds[[0, -1]].tolist())
        offset = np.repeat(self.offset[numbers.start : numbers.stop], np.diff(bounds))
        return Copies(
            wire + offset + self.wire[these],
            start[reads.dst_buffer[these]] + reads.dst[these],
            reads.rows[these],
            reads.row_nbytes[these],
            reads.row_nbytes[these],
            reads.dst_pitch[these],
        )


def starts(names: Sequence[str], address: Mapping[str, int]) -> Int64:
    """Return the address of each buffer, or 0."""
    return np.array([address.get(name, 0) for name in names], np.int64)


def messages(reads: Reads, max_nbytes: int) -> Messages:
    """Assign `reads` to rounds, in their order, so that the receive buffer never exceeds `max_nbytes`.

    Raises:
        ConfigError: `max_nbytes` is less than 256.
    """
    capacity = max_nbytes // RUN_ALIGN * RUN_ALIGN
    if not capacity:
        raise ConfigError("sync.max_staging_bytes", max_nbytes, f"give at least {RUN_ALIGN}")
    table, part = tiles(reads, capacity)
    nbytes = table[:, 2] * table[:, 3]
    trainer = reads.trainer[part].astype(np.int64)
    runs = arrange(
        cut(np.arange(len(table)), nbytes, capacity),
        trainer,
        nbytes,
        np.arange(int(trainer.max(initial=-1)) + 1),
    )
    sizes = align(nbytes[runs.order], PIECE_ALIGN)
    start = np.cumsum(sizes) - sizes
    message, _ = repeated(np.diff(runs.bounds))
    return Messages(
        round=runs.bucket,
        trainer=runs.trainer,
        offset=runs.offset,
        nbytes=runs.nbytes,
        bounds=runs.bounds,
        reads=reads.cut(part[runs.order], table[runs.order]),
        wire=start - start[runs.bounds[:-1]][message],
        origin=part[runs.order],
    )
