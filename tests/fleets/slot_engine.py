"""An engine without a model whose slots hold experts, and a trainer of these experts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard
from weightsync.channel.feed import EngineFeed
from weightsync.engines.loading.arranged_experts import ExpertSlot, arranged
from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.memory.tensors import meta_of
from weightsync.plan import Box, Plan, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.arrangement import Experts, arrangement_key
from weightsync.protocol.messages import Attached, FeedTicket, Loaded
from weightsync.testing import DictEngine

NUM_EXPERTS, SHAPE = 4, (6, 3)
START = (0, 1, 2, 3, 0)
"""The experts in five slots."""


class Stack(nn.Module):
    """Experts of one layer, and a tensor that is not one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(NUM_EXPERTS, *SHAPE))
        self.norm = nn.Parameter(torch.randn(7))


class SlotEngine(DictEngine):
    """Keeps its experts in slots. The tensor ``experts`` has the slots' memory.

    Attributes:
        slots: the expert in each slot.
        num_attached: how often it was connected.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, {"experts": torch.zeros(len(START), *SHAPE), "norm": torch.zeros(7)})
        self.slots, self.num_attached = list(START), 0

    def layout(self) -> Sequence[RankLayout]:
        stack = TensorMeta("experts", "float32", (NUM_EXPERTS, *SHAPE))
        norm, memory = meta_of("norm", self.tensors["norm"]), meta_of("experts", self.tensors["experts"])
        nbytes = memory.nbytes // len(START)
        rows = tuple(
            Segment("experts", Box((expert, 0, 0), (1, *SHAPE)), "experts", slot * nbytes, (nbytes, 12, 4))
            for slot, expert in enumerate(START)
        )
        as_loaded = RankLayout((stack, norm), (*rows, Segment.whole(norm)), buffers=(memory, norm))
        counts, seen, slots = Counter(self.slots), Counter[int](), []
        for expert in self.slots:
            slots.append(ExpertSlot(expert, seen[expert], counts[expert]))
            seen[expert] += 1
        return [arranged(as_loaded, arrangement_key([self.slots]), {"experts": slots}, NUM_EXPERTS)]

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        self.close()
        self.num_attached += 1
        (layout,) = self.layout()
        self._feed = EngineFeed.open(tickets[0], plan, timeout_s, layout)
        self._writer = LiveWriter(plan, layout, self.tensors, self._feed.slots, views=self._feed.views)
        return [Attached(plan.digest(), None, casts=self._feed.casts)]

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        assert self._feed is not None
        self._writer.begin(None)
        return [Loaded(self._feed.receive(attempt, self._writer, timeout_s), self._feed.spans)]

    def experts(self) -> Experts:
        return [list(self.slots)]

    def move_experts(self, experts: Experts) -> None:
        (wanted,) = experts
        held = {expert: self.tensors["experts"][slot].clone() for slot, expert in enumerate(self.slots)}
        for slot, expert in enumerate(wanted):
            self.tensors["experts"][slot] = held[expert]
        self.slots = [*wanted]

    def live_digests(self) -> Sequence[Loaded]:
        return [Loaded(self._writer.digests(), ())]

    def holds(self, model: Stack) -> bool:
        """Return True if each slot has the bytes of its expert."""
        same = torch.equal(self.tensors["experts"], model.experts.detach()[self.slots])
        return same and torch.equal(self.tensors["norm"], model.norm.detach())


class SlotActor(EngineActor):
    """Its actor."""

    def __init__(self, name: str, slot: str) -> None:
        self._slot, self._layouts, self._name = slot, None, name
        self._engine = SlotEngine(name)

    async def balance(self, slots: Sequence[int]) -> None:
        """Move experts as the engine does by itself."""
        await asyncio.to_thread(self._engine.move_experts, [slots])

    async def held(self) -> tuple[list[int], dict[str, torch.Tensor], int]:
        return self._engine.slots, self._engine.tensors, self._engine.num_attached


class StackTrainer(TrainerShard):
    def __init__(self, slot: str) -> None:
        super().__init__(slot)
        self.model = Stack()

    def train(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_()
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}
