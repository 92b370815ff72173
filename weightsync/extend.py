"""The second public door: names for an engine, a source or a transport in another repository.

The names in `__all__` are public, like the names in `weightsync`. docs/extending.md shows how to use them.
"""

from __future__ import annotations

from weightsync.channel.feed import EngineFeed
from weightsync.engines.base import Completion, Engine, Generates, Rollout
from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box, RankLayout, Segment, TensorMeta, share_in_place
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.messages import Attached, Loaded, Published
from weightsync.sources import SOURCES, ComparesReplicas, ExportsWeights, ModelSource
from weightsync.transports import TRANSPORTS, Transport

__all__ = [
    "SOURCES",
    "TRANSPORTS",
    "Attached",
    "Box",
    "ComparesReplicas",
    "Completion",
    "Engine",
    "EngineFeed",
    "ExportsWeights",
    "Generates",
    "LayoutTable",
    "LiveWriter",
    "Loaded",
    "ModelSource",
    "Published",
    "RankLayout",
    "Rollout",
    "Segment",
    "SharedBuffer",
    "TensorMeta",
    "Transport",
    "share_in_place",
    "tensor_digest",
]
