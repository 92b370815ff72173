"""An adapter of a trainer's model, as a separate shard."""

from __future__ import annotations

import os
from typing import Any, Protocol

from weightsync.actors.ray.placement import Placement
from weightsync.actors.shard import Shard
from weightsync.sources import Source
from weightsync.sources.lora.lora import LoraSource


class _HasModel(Protocol):
    model: Any

    def _here(self, slot: str | None) -> Placement: ...


class AdapterShard(Shard):
    """One rank of a LoRA adapter, with its own plan, holder and version.

    Attributes:
        adapter: the source of the adapter's weights.
    """

    def __init__(self, trainer: _HasModel, adapter: str) -> None:
        """`adapter` is PEFT's name of one in the `trainer`'s model. Raises ConfigError if it has none."""
        self._trainer, self.adapter = trainer, LoraSource(trainer.model, adapter)
        self._slot = None if self.adapter.is_on_gpu else f"pid-{os.getpid()}"
        self._here = trainer._here

    def _current_source(self) -> Source:
        if self.adapter.model is not self._trainer.model:
            self.adapter.replace(self._trainer.model)
        return self.adapter
