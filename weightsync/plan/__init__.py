"""Pure planning: two layouts and the members give one frozen plan. Needs only numpy."""

from weightsync.plan.broadcast import make_plan
from weightsync.plan.direct import Reads, Reshard, same_dtype_tensors
from weightsync.plan.explain import Cluster, Explanation
from weightsync.plan.layout import Layout
from weightsync.plan.members import Members, broadcast_groups
from weightsync.plan.plan import Bucket, Piece, Plan, Step, share_in_place
from weightsync.plan.segment import (
    ITEMSIZE,
    MAPPED,
    PUSHED,
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
    "PUSHED",
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
