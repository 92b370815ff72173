"""The quickstart's trainer for tests that look at tokens."""

from __future__ import annotations

import torch

from weightsync.recipes.trainer import GrpoTrainer


class SharpTrainer(GrpoTrainer):
    """The quickstart's trainer, with weights that tell prompts apart from the start."""

    @torch.no_grad()
    def sharpen(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "norm" not in name and "embed" not in name:
                parameter.mul_(12.0)
