"""A rank whose engine moves experts: layouts follow, and loads into slots of before are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.engines.loading.arranged_experts import ExpertSlot, arranged
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.rank.rank import Rank
from weightsync.errors import StateError
from weightsync.memory.tensors import meta_of
from weightsync.plan import RankLayout
from weightsync.plan.layout.arrangement import Experts, arrangement_key


class Host:
    """One rank with two experts in two slots. Its map has no memory while the weights sleep."""

    def __init__(self) -> None:
        self._model = nn.Module()
        self._model.experts = nn.Parameter(torch.zeros(2, 3, 5), requires_grad=False)
        self.slots, self.sleeping, self.num_traces = [0, 1], False, 0

    def model(self) -> nn.Module:
        return self._model

    def checkpoint(self) -> Checkpoint:
        return Checkpoint((meta_of("experts", self._model.experts),), (), frozenset())

    def stored_otherwise(self) -> str:
        return ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_traces += 1
        for _, tensor in weights:
            self._model.experts.copy_(tensor)

    def asleep(self) -> Collection[str]:
        return ["weights"] if self.sleeping else []

    def experts(self) -> Experts:
        assert not self.sleeping, "there is no memory behind the map"
        return [list(self.slots)]

    def move_experts(self, experts: Experts) -> None:
        (self.slots,) = ([*row] for row in experts)

    def arranged(self, layout: RankLayout, live: Mapping[str, torch.Tensor]) -> RankLayout:
        slots = [ExpertSlot(expert, 0, 1) for expert in self.slots]
        return arranged(layout, arrangement_key(self.experts()), {"experts": slots}, 2)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def rank(host: Host) -> Rank:
    found: Any = host
    return Rank("test", 0, torch.device("cpu"), found)


def places(rank: Rank) -> list[tuple[int, int]]:
    return [(each.box.offset[0], each.byte_offset) for each in rank.layout().rank_layout().segments]


def test_the_loader_is_followed_once_and_experts_each_time(host: Host, rank: Rank) -> None:
    assert places(rank) == [(0, 0)]  # both are one box
    rank.move_experts([[1, 0]])
    assert places(rank) == [(1, 0), (0, 60)]
    host.slots = [0, 1]
    assert places(rank) == [(0, 0)]
    assert host.num_traces == 1


def test_the_map_is_not_read_while_it_has_no_memory(host: Host, rank: Rank) -> None:
    before = places(rank)
    host.sleeping = True
    assert rank.experts() == [[0, 1]]
    assert places(rank) == before


def test_digests_of_slots_of_before_are_refused(host: Host, rank: Rank) -> None:
    rank._attached = rank.layout().rank_layout()
    host.slots = [1, 0]
    with pytest.raises(StateError, match=r"experts are in other slots than when it was connected"):
        rank.live_digests()
