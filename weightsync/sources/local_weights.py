"""Describes one trainer rank's weights: boxes of tensors, their memory, and tensors that are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

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


class Transform(Protocol):
    """Publishes computed tensors in place of a model's own, whatever source reads the model."""

    def apply(self, model: torch.nn.Module, weights: LocalWeights) -> LocalWeights:
        """Return `weights` with another layout, and with memory in `computed` for each computed tensor.

        Called on each connect, and if tensors of `model` were replaced. Memory that still fits must not move.
        Raises ConfigError if the tensors cannot be computed.
        """

    def run(self, model: torch.nn.Module, live: Mapping[str, torch.Tensor]) -> None:
        """Compute the tensors of the last `apply` from `live`, the model's tensors. Called in each update.

        Raises StateError if `model` has changed so that `apply` must be called again.
        """
