"""Makes the plan from the layouts of both sides and the members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weightsync.errors import ConfigError, PlanError
from weightsync.plan.broadcast.buckets import RUN_ALIGN, Pieces, arrange, cut, split_large
from weightsync.plan.broadcast.plan import Plan
from weightsync.plan.layout.balance import choose
from weightsync.plan.layout.coverage import check_live
from weightsync.plan.layout.layout import Bool, Int32, Int64, Layout, take
from weightsync.plan.layout.match import Match, Shards, match
from weightsync.plan.layout.members import Members
from weightsync.plan.layout.replicas import Replicas
from weightsync.plan.layout.segment import MOST_NBYTES, TensorMeta
from weightsync.text import count_text


def make_plan(
    source: Layout,
    engines: Mapping[str, Layout],
    members: Members,
    *,
    bucket_bytes: int,
    max_staging_bytes: int,
    slots: int = 2,
    epoch: int = 0,
) -> Plan:
    """Plan a broadcast of all tensors to all engines.

    Args:
        source: the trainers' layout, with as many ranks as `members.trainers`.
        engines: by name, the layout of each engine of `members.engines`. Tensors travel in the order of the
            segments of the engine whose name sorts first.
        members: which holder serves which rank.
        bucket_bytes: the most bytes that travel together; at least 256.
        max_staging_bytes: the most bytes of buckets on a receiving holder.
        slots: buckets per holder; one is filled while another is read. 0 if every engine reads directly.
        epoch: number of the membership.

    Returns:
        The plan. Equal arguments make equal plans.

    Raises:
        PlanError: the layouts do not fit together, leave a byte of an engine out, or are empty or larger than
            4 PiB; names the tensor.
        ConfigError: members do not fit the layouts, or a limit is too small.
    """
    check_members(source.num_ranks, engines, members)
    matched = check_sides(source, engines)
    itemsize = np.array([meta.itemsize for meta in matched.tensors], np.int64)
    check_limits(bucket_bytes, slots, itemsize)
    capacity = bucket_bytes // RUN_ALIGN * RUN_ALIGN
    shards = Shards.of(source, matched)
    pieces = split_large(_choose_pieces(source, shards, itemsize), itemsize, capacity)
    frozen = matched.frozen(source)
    pieces, bucket = _frozen_last(pieces, np.isin(pieces.tensor, frozen), capacity)
    runs = arrange(bucket, pieces.trainer, pieces.nbytes, np.array(members.trainers, np.int64))
    pieces = take(pieces, runs.order)
    plan = Plan(
        epoch=epoch,
        members=members,
        tensors=matched.tensors,
        tied=matched.tied,
        bucket_bytes=bucket_bytes,
        slots=slots,
        piece_tensor=pieces.tensor.astype(np.int32),
        piece_offset=_narrow(pieces.offset),
        piece_extent=_narrow(pieces.extent),
        step_piece=runs.bounds.astype(np.int32),
        step_trainer=runs.trainer.astype(np.int32),
        step_offset=runs.offset,
        step_nbytes=runs.nbytes,
        step_send_buffer=runs.send_buffer_offset,
        bucket_step=np.flatnonzero(np.diff(runs.bucket, prepend=-1, append=-1)).astype(np.int32),
        frozen=frozen,
        replicas=None if shards.are_alone else Replicas.of_pieces(source, matched, shards),
    )
    check_staging(slots, plan.max_bucket_nbytes, max_staging_bytes)
    return plan


def check_sides(source: Layout, engines: Mapping[str, Layout]) -> Match:
    """Pair the tensors of both sides, and prove that segments cover each engine's live parameters.

    Raises the errors of `make_plan`, except errors of segments of `source`.
    """
    ordered = sorted(engines.items())
    matched = match(source, ordered)
    _check_size(matched.tensors)
    # Engines of equal layout share it: it is proven once, under the name of the first.
    for engine, name in {engine: name for name, engine in reversed(ordered)}.items():
        check_live(name, engine)
    return matched


def _choose_pieces(source: Layout, shards: Shards, itemsize: Int64) -> Pieces:
    """Choose one replica of each box, in travel order."""
    offset, extent = source.offset[shards.first], source.extent[shards.first]
    nbytes = extent.prod(axis=1) * itemsize[shards.tensor]
    rank = source.rank[shards.rows].astype(np.int64)
    chosen = shards.start
    if not shards.are_alone:
        chosen = choose(shards.start, shards.size, rank, nbytes, source.num_ranks)
    return Pieces(shards.tensor, rank[chosen], offset, extent, nbytes, shards.tensor)


def _frozen_last(pieces: Pieces, is_frozen: Bool, capacity: int) -> tuple[Pieces, Int64]:
    """Cut buckets, with buckets of frozen pieces after all others. Returns pieces in travel order."""
    if not is_frozen.any():
        return pieces, cut(pieces.unit, pieces.nbytes, capacity)
    pieces = take(pieces, np.argsort(is_frozen, kind="stable"))
    first = int(np.count_nonzero(~is_frozen))
    bucket = cut(pieces.unit[:first], pieces.nbytes[:first], capacity)
    later = cut(pieces.unit[first:], pieces.nbytes[first:], capacity)
    return pieces, np.append(bucket, later + (bucket[-1] + 1 if first else 0))


def check_members(num_trainers: int, engines: Mapping[str, Layout], members: Members) -> None:
    """Check that members match `num_trainers` ranks and `engines`. Raises ConfigError."""
    if len(members.trainers) != num_trainers:
        raise ConfigError(
            "members.trainers", members.trainers, f"the layout has {count_text(num_trainers, 'rank')}"
        )
    known = dict(members.engines)
    if known.keys() != engines.keys():
        raise ConfigError("members.engines", tuple(known), f"the layouts are of {tuple(engines)}")
    for name, layout in engines.items():
        if len(known[name]) != layout.num_ranks:
            raise ConfigError(
                f"members.engines[{name}]",
                known[name],
                f"the layout has {count_text(layout.num_ranks, 'rank')}",
            )


def _check_size(tensors: Sequence[TensorMeta]) -> None:
    total = sum(meta.nbytes for meta in tensors)
    if not total:
        name = tensors[0].name if tensors else "(none)"
        problem = f"none of the {len(tensors)} tensors has an element, so there is nothing to update"
        raise PlanError(name, f"{problem}; register the model's own parameters")
    if total > MOST_NBYTES:
        largest = max(tensors, key=lambda meta: meta.nbytes)
        problem = f"all tensors have {total} bytes together, {largest.nbytes} of them this one"
        raise PlanError(largest.name, f"{problem}; the most is {MOST_NBYTES} (4 PiB)")


def check_limits(bucket_bytes: int, slots: int, itemsize: Int64) -> None:
    """Check that buckets are large enough for a root's pieces. Raises ConfigError."""
    if bucket_bytes < RUN_ALIGN:
        largest = int(itemsize.max(initial=1))
        raise ConfigError(
            "sync.bucket_bytes",
            bucket_bytes,
            f"give at least {RUN_ALIGN}: what a root sends is aligned to that, its largest element "
            f"has {largest} bytes",
        )
    if slots < 0:
        raise ConfigError("sync.slots", slots, "give at least 0")


def check_staging(slots: int, bucket_nbytes: int, max_staging_bytes: int) -> None:
    """Check that buckets of `bucket_nbytes` fit in the staging memory. Raises ConfigError."""
    needed = slots * bucket_nbytes
    if needed > max_staging_bytes:
        raise ConfigError(
            "sync.max_staging_bytes",
            max_staging_bytes,
            f"{count_text(slots, 'bucket')} of {bucket_nbytes} bytes need {needed}; "
            "raise it, or lower sync.bucket_bytes",
        )


def _narrow(values: Int64) -> Int32 | Int64:
    """Convert to int32 if possible, since the plan is sent to every member."""
    return values.astype(np.int32) if values.max(initial=0) < 2**31 else values
