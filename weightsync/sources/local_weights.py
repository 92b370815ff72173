"""What one trainer rank holds: boxes of tensors, and the memory that they are in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weightsync.memory.addresses import local_tensor
from weightsync.memory.tensors import segment_view
from weightsync.plan import RankLayout, Segment

__all__ = ["LocalWeights"]


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """One rank's layout and its live tensors.

    Attributes:
        layout: each segment's `buffer` is a name in `tensors`.
        tensors: live tensors by the trainer's own names. A DTensor stands for its local part.
    """

    layout: RankLayout
    tensors: Mapping[str, torch.Tensor]

    def view(self, segment: Segment) -> torch.Tensor:
        """View a segment's memory, detached: shape ``segment.box.extent``."""
        return segment_view(local_tensor(self.tensors[segment.buffer]), segment)
