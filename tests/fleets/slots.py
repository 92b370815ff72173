"""Trainers of adapters, and engines with slots for them, for tests: their processes import this."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from tests.fleets.actors import Engine
from tests.fleets.component_actors import ComponentTrainer
from weightsync.protocol.adapters import AdapterSpec
from weightsync.testing import DictEngine


class AdapterTrainer(ComponentTrainer):
    """A rank with one adapter, which may be registered under several names."""

    def __init__(self, slot: str) -> None:
        super().__init__(slot, "adapter", ())

    @torch.no_grad()
    def diverge(self) -> None:
        """Put a NaN into the adapter's A."""
        self.model.pairs["up.lora_A"][0, 0] = float("nan")


class SlotEngine(DictEngine):
    """Has as many slots as are asked for."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name, tensors)
        self.adapters: dict[str, DictEngine] = {}

    def open_adapter(self, spec: AdapterSpec) -> DictEngine:
        zeros = {meta.name: torch.zeros(meta.shape) for meta in spec.tensors}
        self.adapters[spec.name] = DictEngine(self.name, zeros)
        return self.adapters[spec.name]

    def close_adapter(self, name: str) -> None:
        self.adapters.pop(name).close()


class SlotActor(Engine):
    def __init__(self, width: int, name: str, slot: str) -> None:
        super().__init__(width, name, slot)
        self._engine: SlotEngine = SlotEngine(name, self._engine.tensors)

    async def adapter(self, name: str) -> tuple[int, Mapping[str, torch.Tensor]]:
        """Return the version of an adapter that it serves, 0 for none, and its tensors."""
        held = self._engine.adapters.get(name)
        return (held.serving(), dict(held.tensors)) if held else (0, {})

    async def pid(self) -> int:
        return os.getpid()
