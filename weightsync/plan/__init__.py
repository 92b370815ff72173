"""Pure planning: two layouts and the members give one frozen plan. Needs only numpy."""

from weightsync.plan.broadcast.broadcast import make_plan
from weightsync.plan.broadcast.explain import Cluster, Explanation
from weightsync.plan.broadcast.plan import Bucket, Piece, Plan, Step, share_in_place
from weightsync.plan.direct.direct import Reads, Reshard, same_dtype_tensors
from weightsync.plan.layout.layout import Layout
from weightsync.plan.layout.members import Members, broadcast_groups
from weightsync.plan.layout.segment import (
    ITEMSIZE,
    MAPPED,
    Box,
    RankLayout,
    Segment,
    Stage,
    TensorMeta,
    Unmatched,
)

__all__ = [
    "ITEMSIZE",
    "MAPPED",
    "Box",
    "Bucket",
    "Cluster",
    "Explanation",
    "Layout",
    "Members",
    "Piece",
    "Plan",
    "RankLayout",
    "Reads",
    "Reshard",
    "Segment",
    "Stage",
    "Step",
    "TensorMeta",
    "Unmatched",
    "broadcast_groups",
    "make_plan",
    "same_dtype_tensors",
    "share_in_place",
]
