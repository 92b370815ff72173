"""Describes one trainer rank's weights: boxes of tensors, and the memory that contains them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from weightsync.plan import RankLayout


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """One rank's layout and its live tensors.

    Attributes:
        layout: each segment's `buffer` is a name in `tensors` or `computed`. It has a `stage` if other ranks
            hold tensors that this rank does not know.
        tensors: live tensors by the trainer's own names. A DTensor stands for its local part.
        excluded: patterns of `exclude` that have left tensors out of the layout already.
        num_experts: experts of a layer on all ranks, if tensors such as ``experts.3.up_proj.weight`` must
            become parts of stacks.
        computed: memory that the source fills for each version, by names that no tensor of a model has.
    """

    layout: RankLayout
    tensors: Mapping[str, torch.Tensor]
    excluded: frozenset[str] = frozenset()
    num_experts: int = 0
    computed: Mapping[str, torch.Tensor] = field(default_factory=dict)
