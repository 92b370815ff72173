"""Trainer ranks that hold the same part of a tensor are compared: those that differ are named, not served."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.fleets.direct import Direct, Source
from tests.fleets.direct import drive as drive_direct
from tests.fleets.loop import CONFIG, Loop
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.errors import PeerLostError, ReplicasDifferError
from weightsync.holder.holder import Holder
from weightsync.holder.staging import HostStaging
from weightsync.plan import Plan
from weightsync.plan.layout.replicas import MOST_ROUNDS
from weightsync.protocol.messages import Digests
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalPeer, LocalTrainer

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


class Replicated(Loop):
    """Two engines, and several trainers that each hold the whole model."""

    num_trainers = 2

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.models, self.sources = [self.model], [self.source]
        for _ in range(self.num_trainers - 1):
            model = self.make()
            model.load_state_dict(self.model.state_dict())
            self.models.append(model)
            self.sources.append(self.source_of(model))
            holder = Holder(f"holder {len(self.holders)}", "127.0.0.1")
            self.fleet.trainers.append((LocalTrainer(self.sources[-1]), len(self.holders)))
            self.holders.append(holder)
            self.fleet.holders.append(LocalPeer(holder))

    def train(self) -> None:
        super().train()
        for model in self.models[1:]:
            model.load_state_dict(self.model.state_dict())

    def close(self) -> None:
        for source in self.sources[1:]:
            source.close()
        super().close()


class Four(Replicated):
    num_trainers = 4


def drive(
    work: Callable[[Replicated], Coroutine[object, object, None]],
    config: SyncConfig = CONFIG,
    cls: type[Replicated] = Replicated,
) -> None:
    loop = cls(config)
    try:
        asyncio.run(work(loop))
    finally:
        loop.close()


@torch.no_grad()
def flip(model: nn.Module, name: str) -> None:
    model.get_parameter(name).view(torch.int32).view(-1)[0] ^= 1


async def update_until_found(loop: Replicated) -> None:
    for version in range(2, 2 + MOST_ROUNDS):
        await loop.controller.update(version)


def test_two_plain_trainers_with_other_seeds_are_named_before_engines_pause() -> None:
    async def work(loop: Replicated) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.train()
        with torch.no_grad():
            for parameter in loop.models[1].parameters():
                parameter.normal_()
        await loop.controller.connect()
        with pytest.raises(ReplicasDifferError, match=r"trainer 0, trainer 1 in 0\.weight") as caught:
            await loop.controller.update(2)
        assert {name for name, _ in caught.value.differing} == {"trainer 0", "trainer 1"}
        assert all(set(tensors) == set(NAMES) for _, tensors in caught.value.differing)
        records = [member.record for member in loop.fleet.engines.values()]
        assert {(each.state, each.version) for each in records} == {(EngineState.SERVING, 1)}
        loop.train()
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 3}
        assert loop.holds_the_models_weights("e0")

    drive(work)


def test_of_four_the_one_that_differs_is_named_alone() -> None:
    async def work(loop: Replicated) -> None:
        await loop.controller.connect()
        flip(loop.models[2], "1.weight")
        with pytest.raises(ReplicasDifferError) as caught:
            await loop.controller.update(1)
        assert caught.value.differing == (("trainer 2", ("1.weight",)),)

    drive(work, cls=Four)


@pytest.mark.parametrize("stage", ["none", "host"])
def test_a_bit_that_flips_later_is_found_once_its_round_comes(stage: str) -> None:
    async def work(loop: Replicated) -> None:
        await loop.controller.connect()
        loop.train()
        await loop.controller.update(1)
        flip(loop.models[0], "0.bias")
        with pytest.raises(ReplicasDifferError) as caught:
            await update_until_found(loop)
        assert {tensors for _, tensors in caught.value.differing} == {("0.bias",)}

    drive(work, replace(CONFIG, stage=stage))


def test_a_rank_that_missed_a_step_is_found_by_the_next_update() -> None:
    """It differs in every tensor, whichever round it is."""

    async def work(loop: Replicated) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        kept = copy.deepcopy(loop.models[1].state_dict())
        loop.train()
        loop.models[1].load_state_dict(kept)
        with pytest.raises(ReplicasDifferError, match="trainer 0, trainer 1 in"):
            await loop.controller.update(2)

    drive(work)


class InPlace(Direct):
    """Two trainers whose memory holders read in place, and two engines."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.other = self.make()
        self.other.load_state_dict(self.model.state_dict())
        self.second = Source(self.other)
        self.second.shared, self.second.in_place = self.source.shared, True
        index = len(self.holders)
        holder = Holder(f"holder {index}", "127.0.0.1", make_staging=self.stage_trainer)
        self.holders.append(holder)
        self.fleet.holders.append(LocalPeer(holder))
        self.fleet.trainers.append((LocalTrainer(self.second), index))

    def stage_trainer(self, plan: Plan, index: int, *buffers: Any) -> HostStaging:
        return self.stage(0, plan, index, *buffers)

    def close(self) -> None:
        self.second.close()
        super().close()


def test_memory_that_is_read_in_place_is_compared_before_the_first_byte_moves() -> None:
    async def work(loop: Direct) -> None:
        assert isinstance(loop, InPlace)
        await loop.controller.connect()
        assert (await loop.controller.update(1)).routes == {"e0": "direct", "e1": "direct"}
        await loop.controller.connect()
        flip(loop.other, "1.weight")
        with pytest.raises(ReplicasDifferError, match=r"trainer 0, trainer 1 in 1\.weight;"):
            await loop.controller.update(2)
        assert {m.record.version for m in loop.fleet.engines.values()} == {1}
        assert {m.record.state for m in loop.fleet.engines.values()} == {EngineState.SERVING}

    drive_direct(work, cls=InPlace)


def test_a_replica_that_an_engine_read_and_nobody_digested_is_named_and_no_engine_blamed() -> None:
    """One rank digests a box, an engine reads it from another one, and its round has not come."""

    async def work(loop: Direct) -> None:
        assert isinstance(loop, InPlace)
        await loop.controller.connect()
        await loop.controller.update(1)
        plan = loop.controller.plan
        assert plan
        assert plan.replicas
        claims = plan.replicas.claims(1)
        later = {plan.tensors[t].name for t in claims.tensor[claims.round > 0].tolist()}
        for name in later:
            flip(loop.other, name)
        with pytest.raises(ReplicasDifferError) as caught:
            await loop.controller.update(2)
        assert {name for _, tensors in caught.value.differing for name in tensors} == later
        assert {m.record.state for m in loop.fleet.engines.values()} == {EngineState.STALE}
        loop.other.load_state_dict(loop.model.state_dict())
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert report.routes == {"e0": "direct", "e1": "direct"}

    drive_direct(work, cls=InPlace)


def test_a_source_that_cannot_compare_is_said_once_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Replicated) -> None:
        loop.fleet.trainers[1] = (LocalTrainer(Plain(loop.sources[1])), loop.fleet.trainers[1][1])
        await loop.controller.connect()
        for version in (1, 2):
            await loop.controller.update(version)

    drive(work)
    assert caplog.text.count("replicas are not compared: the source of trainer 1") == 1


class Plain:
    """A source with what `Source` asks for, and nothing else."""

    def __init__(self, source: ModuleSource) -> None:
        self.layout, self.attach, self.publish = source.layout, source.attach, source.publish
        self.close = source.close


def test_a_rank_that_does_not_say_its_digests_is_not_waited_for() -> None:
    async def work(loop: Replicated) -> None:
        await loop.controller.connect()
        flip(loop.models[1], "0.bias")

        async def lost() -> Digests:
            raise PeerLostError("trainer 1", "killed")

        for trainer, _ in loop.fleet.trainers:
            trainer.replica_digests = lost  # type: ignore[method-assign]
        with pytest.raises(ReplicasDifferError, match="which ones is not known"):
            await loop.controller.update(1)

    drive(work)
