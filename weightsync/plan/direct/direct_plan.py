"""Makes the plan of a fleet in which every engine reads directly."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weightsync.plan.broadcast.broadcast import check_members, check_sides
from weightsync.plan.broadcast.plan import Plan
from weightsync.plan.direct.alike_shards import AlikeShards
from weightsync.plan.layout.layout import Layout
from weightsync.plan.layout.match import Match
from weightsync.plan.layout.members import Members
from weightsync.plan.layout.replicas import Replicas
from weightsync.plan.layout.trainers_layout import TrainersLayout


def make_direct_plan(
    source: TrainersLayout,
    engines: Mapping[str, Layout],
    members: Members,
    *,
    bucket_bytes: int,
    epoch: int = 0,
) -> Plan:
    """Plan for engines that all read directly: without buckets, and without pieces.

    Each trainer rank digests its own boxes; ranks that hold the same box take turns. Arguments and errors are
    the same as of `weightsync.plan.make_plan`.
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
    """Return which rank digests boxes of several ranks. Proves that boxes tile every tensor.

    One tensor stands for all tensors that are cut alike. Raises PlanError as `Shards.of`.
    """
    alike = AlikeShards.of(source, matched)
    return Replicas.of(alike.kind, np.arange(len(alike.first)), alike.listed, alike.shards)
