"""Trainers of a model, a draft and an adapter, and engines that serve all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tests.fleets.speculating import WIDTH, SpeculatingEngine, TrainersDraft, TrainersTarget
from weightsync import EngineActor, TrainerShard
from weightsync.engines.base import Engine
from weightsync.protocol.adapters import AdapterSpec
from weightsync.testing import DictEngine

RANK = 8


class ComponentTrainer(TrainerShard):
    """A rank that holds a model, its draft alone, or an adapter of PEFT's form, as `part` says."""

    def __init__(self, slot: str, part: str, frozen: Sequence[str]) -> None:
        super().__init__(slot, frozen=frozen)
        self._kept = frozen
        torch.manual_seed(0)
        self.model = {"model": TrainersTarget, "adapter": Adapted}.get(part, lambda: None)()
        if part == "draft":
            self.draft = TrainersDraft()

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Draw new weights, but for frozen ones; the same on each rank that holds them."""
        torch.manual_seed(seed)
        for name, parameter in (self.model or self.draft).named_parameters():
            if name not in self._kept:
                parameter.normal_()

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Copy what it holds, by the names that plans have."""
        prefix = "" if self.model else "draft/"
        if isinstance(self.model, Adapted):
            return {f"{name}.weight": each.clone() for name, each in self.model.pairs.items()}
        return {prefix + name: each.clone() for name, each in (self.model or self.draft).state_dict().items()}


class Adapted(nn.Module):
    """A model in which a layer `up` has a LoRA adapter, as PEFT's modules have it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8, bias=False)
        self.up.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, RANK, bias=False)})
        self.up.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, 8, bias=False)})
        self.up.scaling = {"default": 1.0}  # type: ignore[assignment]

    @property
    def pairs(self) -> Mapping[str, torch.Tensor]:
        return {f"up.{kind}": getattr(self.up, kind)["default"].weight for kind in ("lora_A", "lora_B")}


class Serving(SpeculatingEngine):
    """An engine with a model, a draft and slots for adapters."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.adapters: dict[str, DictEngine] = {}
        torch.manual_seed(1)  # what a frozen draft read from its files
        self.host.drafting.qk.weight.data.normal_()

    def open_adapter(self, spec: AdapterSpec) -> Engine:
        zeros = {
            meta.name: torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in spec.tensors
        }
        self.adapters[spec.name] = DictEngine(self.name, zeros)
        return self.adapters[spec.name]

    def close_adapter(self, name: str) -> None:
        self.adapters.pop(name).close()


class ServingActor(EngineActor):
    def __init__(self, name: str, slot: str) -> None:
        self._slot, self._layouts = slot, None
        self._engine: Serving = Serving(name)

    async def weights(self) -> Mapping[str, torch.Tensor]:
        """Copy its model and its draft."""
        return {name: each.clone() for name, each in self._engine.host.live()}

    async def adapter(self) -> tuple[int, Mapping[str, torch.Tensor]]:
        """Return the version of the adapter that it serves, 0 for none, and copy its tensors."""
        held = self._engine.adapters.get("math")
        return (held.serving(), dict(held.tensors)) if held else (0, {})
