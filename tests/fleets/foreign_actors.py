"""Classes of actors that know nothing of weightsync."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import torch

from tests.fleets.actors import build
from weightsync.testing import DictEngine

WIDTH = 16


class PlainTrainer:
    """As OpenRLHF's: the model is an attribute of an attribute."""

    def __init__(self) -> None:
        self.actor = SimpleNamespace(model=build(WIDTH))

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.actor.model.parameters():
                parameter.normal_()
        return {name: tensor.clone() for name, tensor in self.actor.model.state_dict().items()}


class AsyncTrainer(PlainTrainer):
    async def train(self, seed: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().train(seed)


def engine_of_zeros() -> DictEngine:
    return DictEngine("", {name: torch.zeros_like(each) for name, each in build(WIDTH).state_dict().items()})


class PlainEngine:
    def __init__(self) -> None:
        self.llm = engine_of_zeros()

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.llm.tensors)

    def pid(self) -> int:
        return os.getpid()


class AsyncEngine:
    def __init__(self) -> None:
        self.llm = engine_of_zeros()

    async def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.llm.tensors)

    async def pid(self) -> int:
        return os.getpid()
