"""Trainers with models that stand for a pipeline's stages, and an engine with what the checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.megatron_standin import Place, model_of
from weightsync import EngineActor, TrainerShard
from weightsync.sources.megatron import MegatronSource
from weightsync.testing import DictEngine

VOCAB, PADDED, WIDTH = 11, 16, 8
EMBEDDING, NORM = "embedding.word_embeddings.weight", "decoder.layers.{}.input_layernorm.weight"


@dataclass(frozen=True)
class Given:
    """What one trainer says of its rank. The stage holds `num_layers` layers from `first_layer` on."""

    stage: int = 0
    first_layer: int = 0
    num_layers: int = 1
    dtype: str = "float32"
    width: int = WIDTH
    family: str = "llama"
    vocab_size: int = VOCAB
    settings: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> torch.nn.Module:
        dtype = getattr(torch, self.dtype)
        shapes = {NORM.format(layer): (self.width,) for layer in range(self.num_layers)}
        if self.stage == 0:
            shapes[EMBEDDING] = (PADDED, WIDTH)
        tensors = {name: torch.full(shape, 1.0 + self.stage, dtype=dtype) for name, shape in shapes.items()}
        return model_of(tensors, first_layer=self.first_layer, groups={"pp": Place(self.stage, 2)})


class Staged(TrainerShard):
    """A trainer rank that declares the layout it is given."""

    def __init__(self, slot: str) -> None:
        super().__init__(slot)

    def say(self, given: Given) -> None:
        self.source = MegatronSource(
            given.model(), family=given.family, vocab_size=given.vocab_size, **given.settings
        )

    def say_as_model(self, given: Given) -> None:
        """As `say`, and leave it to the base class to make the source."""
        self.source, self.model = None, given.model()
        kind = type(self.model)
        home = {"__module__": "megatron.core.transformer.module"}
        self.model.__class__ = type("MegatronModule", (kind,), home)
        self.hf_config = SimpleNamespace(model_type=given.family, vocab_size=given.vocab_size)


class TwoLayers(EngineActor):
    """An engine with an embedding and the norms of two layers."""

    def __init__(self, name: str, slot: str) -> None:
        self._slot, self._layouts = slot, None
        norms = {f"model.layers.{layer}.input_layernorm.weight": torch.zeros(WIDTH) for layer in range(2)}
        self._engine = DictEngine(name, {"model.embed_tokens.weight": torch.zeros(VOCAB, WIDTH)} | norms)

    async def means(self) -> list[float]:
        return [float(tensor.mean()) for tensor in self._engine.tensors.values()]
