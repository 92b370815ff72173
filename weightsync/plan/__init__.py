"""Pure planning: two layouts and the members -> one frozen plan. Needs numpy, nothing else."""

from weightsync.plan.box import Box
from weightsync.plan.broadcast import make_plan
from weightsync.plan.direct import Reshard, castless
from weightsync.plan.explain import Cluster, Explanation
from weightsync.plan.groups import broadcast_groups
from weightsync.plan.layout import Layout
from weightsync.plan.members import Members
from weightsync.plan.plan import Bucket, Piece, Plan, Step
from weightsync.plan.reads import Reads
from weightsync.plan.segment import MAPPED, RankLayout, Segment
from weightsync.plan.tensors import ITEMSIZE, TensorMeta

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
    "Step",
    "TensorMeta",
    "broadcast_groups",
    "castless",
    "make_plan",
]
