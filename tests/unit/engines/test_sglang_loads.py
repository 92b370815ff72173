"""A parameter that SGLang's loader passes over is named, if no trace has shown that it fills all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from weightsync.engines.sglang.api import Loads


class Model(nn.Module):
    """Passes over names that it does not have, as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.proj = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            if name in parameters:
                parameters[name].copy_(weight)


def test_a_parameter_that_got_nothing_is_named() -> None:
    loads = Loads(Model(), is_counted=True)
    loads.load([("gate.weight", torch.ones(2, 2)), ("experts.weight", torch.ones(2, 2))])
    with pytest.raises(RuntimeError, match=r"left out proj\.weight: 1 tensors got nothing"):
        loads.finish()
    loads.load([("proj.weight", torch.ones(2, 2))])
    loads.finish()
    uncounted = Loads(Model())
    uncounted.load([("gate.weight", torch.ones(2, 2))])
    uncounted.finish()
