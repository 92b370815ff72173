"""The seam between a source and tensors that it computes from a model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from weightsync.sources.local_weights import LocalWeights


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
