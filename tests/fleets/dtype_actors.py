"""A trainer and engines whose tensors have dtypes of their own, for tests that look at live weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import torch

from weightsync import EngineActor, TrainerShard


class DtypeTrainer(TrainerShard):
    """A model of transformers in `dtype`. Its routing tables are buffers that it trains, in float32."""

    def __init__(self, path: str, dtype: str, frozen: tuple[str, ...] = ()) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__("trainer", frozen=frozen)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    def train(self, seed: int, start: str = "") -> None:
        """Draw all tensors whose names begin with `start`, and buffers."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                if name.startswith(start):
                    tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.05)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


class DtypeEngine(EngineActor):
    async def pid(self) -> int:
        return os.getpid()

    async def live(self) -> Mapping[str, torch.Tensor]:
        """Copy the live tensors."""
        if hasattr(self._engine, "call"):
            return await asyncio.to_thread(self._engine.call, _live)
        return {name: each.clone() for name, each in self._engine.model.state_dict().items()}


@torch.no_grad()
def _live(engine: Any) -> Mapping[str, torch.Tensor]:
    """Copy a vLLM's parameters. Of packed layers, take what they answer to the unit vectors."""
    model = engine.model_executor.driver_worker.worker.model_runner.get_model()
    found = {name: each.detach().clone() for name, each in model.named_parameters()}
    for path, module in model.named_modules():
        if (name := f"{path}.weight") in found and not found[name].numel():
            units = torch.eye(module.input_size, dtype=found[name].dtype)
            found[name] = module.quant_method.apply(module, units, None).t().contiguous()
    return found
