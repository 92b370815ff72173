"""What a benchmark sees of an engine's weights: every element, wherever a rank holds it."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import rank_probe
from benchmarks.models import Tensor
from benchmarks.values import fill
from weightsync.plan import Box, RankLayout, Segment

QUERY, OUT = Tensor("q", (4, 6)), Tensor("o", (8, 6))


class Rank(nn.Module):
    """The second of two ranks: rows of `q` behind other rows in one parameter, columns of `o`."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(5, 6, dtype=torch.bfloat16))
        self.o = nn.Parameter(torch.zeros(8, 3, dtype=torch.bfloat16))

    def load_weights(self, version: int) -> None:
        time.sleep(0.01)
        with torch.no_grad():
            boxes = [segment.box for segment in LAYOUT.segments]
            fill(zip((QUERY, OUT), boxes, (self.qk[3:], self.o), strict=True), version)


LAYOUT = RankLayout(
    (),
    (
        Segment("q", Box((2, 0), (2, 6)), "qk", 3 * 6 * 2, (12, 2)),
        Segment("o", Box((0, 3), (8, 3)), "o", 0, (6, 2)),
    ),
)


def wrong(model: Rank, version: int) -> int:
    return rank_probe.answer(model, "wrong", (LAYOUT, (QUERY, OUT), version))


def test_each_element_that_differs_is_counted() -> None:
    model = Rank()
    rank_probe.answer(model, "poison", ())
    assert wrong(model, 1) == 2 * 6 + 8 * 3
    model.load_weights(1)
    assert wrong(model, 1) == 0
    assert wrong(model, 2) > 30
    with torch.no_grad():
        model.o[7, 2] = 5.0
        model.qk[0] = 5.0  # of nobody's
    assert wrong(model, 1) == 1


def test_the_loader_is_timed_since_the_weights_were_made_wrong(tmp_path: Path) -> None:
    model = Rank()

    def ask(command: str) -> object:
        file = tmp_path / command
        call = pickle.dumps((str(file), command, ()))
        rank_probe.receive(model, [(call, torch.empty(0))])
        return pickle.loads(file.read_bytes())

    rank_probe.answer(model, "watch", ())
    model.load_weights(1)
    model.load_weights(2)
    assert ask("seconds")["load"] >= 0.02
    assert ask("poison") is None
    assert ask("seconds") == {}
    assert ask("nothing") is None


def test_a_layout_of_other_tensors_is_noticed() -> None:
    with pytest.raises(AssertionError):
        rank_probe.answer(Rank(), "wrong", (LAYOUT, (QUERY,), 1))
