"""Tokens to experts on other ranks, and back: `dispatch` and `combine` for mixture-of-experts layers.

    mover = SharedMemoryMover(process_group)
    group = ExpertGroup(mover, num_experts=64, top_k=8, hidden=7168, max_tokens=4096)
    rows, counts, handle = group.dispatch(x, topk_ids, topk_weights)
    tokens = group.combine(experts(rows, counts), handle)

The names in `__all__` are public, like the names in `weightsync`. docs/experts.md shows how to use them.
"""

from __future__ import annotations

from weightsync.experts.cuda import CudaMover
from weightsync.experts.forwarding import ForwardingMover
from weightsync.experts.fp8 import Fp8Rows
from weightsync.experts.group import ExpertGroup
from weightsync.experts.movers import LocalMover, MessageMover, Mover
from weightsync.experts.routing import Routing
from weightsync.experts.shared_memory import SharedMemoryMover

__all__ = [
    "CudaMover",
    "ExpertGroup",
    "ForwardingMover",
    "Fp8Rows",
    "LocalMover",
    "MessageMover",
    "Mover",
    "Routing",
    "SharedMemoryMover",
]
