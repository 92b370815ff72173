"""Guards a model's own tensors, where a source adds buffers that do not move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weightsync.sources.tensors import Guard


class OwnTensors:
    """A guard that is asked about the model's own tensors alone."""

    def __init__(self, guard: Guard, tensors: Mapping[str, torch.Tensor]) -> None:
        """`guard` is of `tensors`, the model's own."""
        self._guard, self._names = guard, frozenset(tensors)
        self.strays = guard.strays

    def as_before(self, model: Any) -> bool:  # noqa: ANN401 - a framework's
        """Return True if `model` holds the same tensors at the same addresses."""
        return self._guard.as_before(model)

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the model's own tensors that are elsewhere now."""
        return self._guard.moved({name: each for name, each in tensors.items() if name in self._names})
