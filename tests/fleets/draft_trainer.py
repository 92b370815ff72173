"""A trainer of a model, of the draft that engines speculate with, or of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from tests.models import redraw
from weightsync import TrainerShard


class DraftTrainer(TrainerShard):
    """Trains what is in the folders. An EAGLE draft beside its model uses the model's embedding."""

    def __init__(self, model: str = "", draft: str = "", eagle: str = "") -> None:
        from transformers import AutoModelForCausalLM

        self.model = None
        if model:
            self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        if draft:
            self.draft = AutoModelForCausalLM.from_pretrained(draft).eval()
        if eagle:
            self.draft = module_of(load_file(Path(eagle) / "model.safetensors"))
            self.draft.embed_tokens = self.model.model.embed_tokens

    def train(self, part: str, seed: int) -> None:
        """Draw new weights: for equal seeds, a model and a draft of one form are equal."""
        model = getattr(self, part)
        if part == "draft" and hasattr(model, "embed_tokens"):
            draw = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for name, each in model.named_parameters():
                    if "embed" not in name:
                        each.copy_(torch.randn(each.shape, generator=draw) * each.shape[-1] ** -0.5)
        else:
            redraw(model, seed)

    def weights(self, part: str) -> Mapping[str, torch.Tensor]:
        """Copy the part's own weights."""
        model = getattr(self, part)
        shared = {id(each) for each in self.model.parameters()} if part == "draft" and self.model else set()
        own = {name: each for name, each in model.named_parameters() if id(each) not in shared}
        return {name: each.detach().clone() for name, each in own.items()}


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module whose parameters have these names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        holder = root
        for each in path:
            if each not in dict(holder.named_children()):
                holder.add_module(each, nn.Module())
            holder = holder.get_submodule(each)
        holder.register_parameter(leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return root
