"""Actors that share a slot and take turns: a trainer of a whole model, and an engine that sleeps."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.models import build_tiny_qwen3, greedy
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard

PROMPTS = [[1, 2, 3], [7, 5, 4, 9]]
GREEDY = {"max_tokens": 8, "temperature": 0.0}


class Teacher(TrainerShard):
    """A whole model, whose greedy tokens are what the engine has to say."""

    def __init__(self, path: str, slot: str) -> None:
        super().__init__(slot, offloads=True)
        self.model = build_tiny_qwen3(Path(path, "teacher"), False, 1)  # the engine is reading `path`

    def train(self, seed: int = 9) -> list[list[int]]:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.5 * torch.randn(parameter.shape, generator=draw))
        return self.says()

    def says(self) -> list[list[int]]:
        return greedy(self.model, PROMPTS, GREEDY["max_tokens"])

    def live_nbytes(self) -> int:
        return sum(each.untyped_storage().nbytes() for each in self.model.parameters())


class Sleeper(EngineActor):
    def live_nbytes(self) -> int:
        return sum(each.untyped_storage().nbytes() for each in self._engine.model.parameters())
