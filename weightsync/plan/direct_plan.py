"""Makes the plan of a fleet in which every engine reads directly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from weightsync.plan.broadcast import check_members, check_sides
from weightsync.plan.layout import Layout
from weightsync.plan.match import Match, Shards
from weightsync.plan.members import Members
from weightsync.plan.plan import Plan
from weightsync.plan.replicas import Replicas
from weightsync.plan.tensor_rows import first_alike
from weightsync.plan.trainers_layout import TrainersLayout


def make_direct_plan(
    source: TrainersLayout,
    engines: Mapping[str, Layout],
    members: Members,
    *,
    bucket_bytes: int,
    epoch: int = 0,
) -> Plan:
    """Plan for engines that all read directly: without buckets, and without pieces.

    Each trainer rank digests what it holds; those that hold the same box take turns. Arguments and errors
    are those of `weightsync.plan.make_plan`.
    """
    check_members(source.num_ranks, engines, members)
    matched = check_sides(source.stated, engines)
    return Plan(
        epoch=epoch,
        members=members,
        tensors=matched.tensors,
        tied=matched.tied,
        bucket_bytes=bucket_bytes,
        slots=0,
        piece_tensor=np.zeros(0, np.int32),
        piece_offset=np.zeros((0, 1), np.int32),
        piece_extent=np.zeros((0, 1), np.int32),
        step_piece=np.zeros(1, np.int32),
        step_trainer=np.zeros(0, np.int32),
        step_offset=np.zeros(0, np.int64),
        step_nbytes=np.zeros(0, np.int64),
        step_send_buffer=np.zeros(0, np.int64),
        bucket_step=np.zeros(1, np.int32),
        frozen=matched.frozen(source.stated),
        replicas=_replicas(source, matched),
    )


def _replicas(source: TrainersLayout, matched: Match) -> Replicas | None:
    """Return which rank digests what several hold. Proves that boxes tile every tensor.

    Of tensors that are cut alike one stands for all. Raises PlanError as `Shards.of`.
    """
    first = first_alike(source.stated)
    kept = first == np.arange(len(first))
    listed = source.of_tensors(kept)
    of_first = np.flatnonzero(kept[matched.source])
    number = np.cumsum(kept) - 1
    part = replace(
        matched,
        tensors=tuple(matched.tensors[t] for t in of_first.tolist()),
        source=number[matched.source[of_first]],
    )
    return Replicas.of(number[first[matched.source]], part.source, listed, Shards.of(listed, part))
