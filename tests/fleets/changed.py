"""What may become of a trainer's self.model between two updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.fleets.actors import Trainer, build
from weightsync.errors import MovedError
from weightsync.protocol.messages import PublishTask

WIDTH = 16


class Moving(Trainer):
    """Says once, if asked to, that its weights are in other memory, as one that is read in place does."""

    moves = False

    def move(self) -> None:
        self.moves = True

    def sync_publish(self, task: PublishTask, ticket: int = 0, tells: bool = False) -> Any:
        if self.moves:
            self.moves = False
            raise MovedError("trainer 0: 0.weight is in other memory: connect() again")
        return super().sync_publish(task, ticket, tells)


def another(trainer: Trainer) -> None:
    torch.manual_seed(7)
    trainer.model = build(WIDTH)


def there_and_back(trainer: Trainer) -> None:
    trainer.model.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        trainer.model[0].weight.add_(1)  # type: ignore[index]


def another_parameter(trainer: Trainer) -> None:
    trainer.model[1] = nn.Linear(WIDTH, 8)  # type: ignore[index]
    trainer.model[1].weight = nn.Parameter(torch.ones(WIDTH, 8).t())  # type: ignore[index]
    nn.init.ones_(trainer.model[1].bias)  # type: ignore[index]


OTHER: list[tuple[Callable[[Trainer], object], str]] = [
    (
        lambda t: setattr(t, "model", build(WIDTH + 1)),
        "0.weight is float32 (17, 17), and was",
    ),
    (lambda t: t.model.append(nn.Linear(2, 2)), "2.weight is new"),  # type: ignore[operator]
    (lambda t: t.model.to(torch.bfloat16), "0.weight is bfloat16"),
    (lambda t: t.model.register_buffer("steps", torch.ones(1)), "steps is new"),
    (lambda t: setattr(t.model[1], "bias", t.model[0].bias), "1.bias is now tied to 0.bias"),  # type: ignore[index]
    (lambda t: setattr(t.model[1], "bias", None), "1.bias is gone"),  # type: ignore[index]
]
