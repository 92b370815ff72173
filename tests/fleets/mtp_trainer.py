"""A trainer of a model that has multi-token prediction layers (MTP)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tests.fleets.draft_trainer import module_of
from tests.mtp_models import draw_target, mtp_weights
from weightsync import TrainerShard


class MtpTrainer(TrainerShard):
    """Trains the model in a folder, and its MTP layer: in ``self.model``, or apart, in ``self.draft``."""

    def __init__(self, path: str, family: str, apart: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.path, self.family = Path(path), family
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.layers = module_of(mtp_weights(self.path, family, 0))
        if apart:
            self.draft = self.layers
        else:
            _attach(self.model, self.layers)

    @torch.no_grad()
    def train(self, model: int, draft: int) -> None:
        """Draw new weights by these seeds."""
        draw_target(self.model, model)
        drawn = mtp_weights(self.path, self.family, draft)
        for name, each in self.layers.named_parameters():
            each.copy_(drawn[name])

    def mtp_weights(self) -> Mapping[str, torch.Tensor]:
        """Copy the weights of the MTP layer."""
        return {name: each.detach().clone() for name, each in self.layers.named_parameters()}


def _attach(model: nn.Module, added: nn.Module) -> None:
    """Have `model` hold the modules of `added` that it lacks."""
    for name, module in added.named_children():
        if name in dict(model.named_children()):
            _attach(model.get_submodule(name), module)
        else:
            model.add_module(name, module)
