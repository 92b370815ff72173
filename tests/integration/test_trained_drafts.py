"""A draft that is trained with the model: one update, one commit, one version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.fleets.loop import CONFIG
from tests.fleets.speculating import WIDTH, SpeculatingEngine, TrainersDraft, TrainersTarget
from weightsync.config import Components, SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.errors import ConfigError, PlanError, StateError, VerifyError
from weightsync.holder.holder import Holder
from weightsync.memory.addresses import local_tensor
from weightsync.plan import RankLayout
from weightsync.plan.layout.draft import Draft
from weightsync.protocol.messages import Loaded
from weightsync.protocol.peers import TrainerPeer
from weightsync.sources import make_components
from weightsync.sources.base import Models
from weightsync.testing import DictEngine, LocalEngine, LocalPeer, LocalTrainer

TRAINED = replace(CONFIG, components={"draft": "trained"})
FROZEN = replace(TRAINED, components={"draft": "frozen"})


LOADING: ContextVar[Engine] = ContextVar("LOADING")


class Engine(SpeculatingEngine):
    spoils = ""

    def load(self, attempt: int, timeout_s: float) -> Sequence[Loaded]:
        LOADING.set(self)
        return super().load(attempt, timeout_s)


class Speculating:
    """Trainer ranks that hold a model, a draft, or both, and two engines that speculate."""

    def __init__(
        self, *trainers: Models, config: SyncConfig = TRAINED, packs: bool = False, **settings: Any
    ) -> None:
        self.models = [*trainers]
        self.sources = [make_components(models, **settings) for models in trainers]
        self.packs = packs
        first = len(trainers)
        self.holders = [Holder(f"holder {i}", "127.0.0.1") for i in range(first + 2)]
        self.engines: dict[str, Engine] = {}
        self.fleet = Fleet(
            [(LocalTrainer(source), i) for i, source in enumerate(self.sources)],
            {},
            [LocalPeer(holder) for holder in self.holders],
        )
        for number, name in enumerate(("e0", "e1")):
            self.start(name, first + number)
        self.controller = Controller(config, self.fleet)

    def start(self, name: str, holder: int) -> None:
        """Start an engine, or another in its place."""
        self.engines[name] = Engine(name, self.packs)
        self.fleet.engines[name] = EngineMember(LocalEngine(self.engines[name]), (holder,))

    def take_over(self, config: SyncConfig, trainers: list[tuple[TrainerPeer, int]]) -> Controller:
        """Return another driver of the same engines."""
        members = {name: EngineMember(each.peer, each.holders) for name, each in self.fleet.engines.items()}
        self.fleet = Fleet(trainers, members, self.fleet.holders)
        return Controller(config, self.fleet)

    @torch.no_grad()
    def train(self, *, target: bool = True, draft: bool = True, but: str = "") -> None:
        for model, speculator in self.models:
            for module in (model if target else None, speculator if draft else None):
                for name, parameter in module.named_parameters() if module else ():
                    if name != but:
                        local_tensor(parameter).normal_()

    def differing(self, name: str) -> list[str]:
        """Return the names of the tensors that engine `name` does not hold as trainers have them."""
        held: dict[str, torch.Tensor] = {}
        for model, draft in self.models:
            held |= dict(model.named_parameters()) if model else {}
            held |= {f"draft/{each}": p for each, p in draft.named_parameters()} if draft else {}
        live = dict(self.engines[name].host.live())
        return [
            each
            for each, tensor in live.items()
            if each not in held or not torch.equal(local_tensor(held[each]), tensor)
        ]

    def trained(self, name: str) -> bool:
        """Whether engine `name` holds all that trainers have."""
        held = {*(each for models in self.models for each in _names(models))}
        return not held.intersection(self.differing(name))

    def close(self) -> None:
        for part in (*self.sources, *self.engines.values(), *self.holders):
            part.close()


def _names(models: Models) -> Iterator[str]:
    for module, prefix in zip(models, ("", "draft/"), strict=True):
        yield from (f"{prefix}{name}" for name, _ in module.named_parameters()) if module else ()


class Eagle(TrainersDraft):
    """A trainer's draft that uses its target's embedding."""

    def __init__(self, target: TrainersTarget) -> None:
        super().__init__()
        self.embed = target.embed


def apart() -> list[Models]:
    return [(TrainersTarget(), None), (None, TrainersDraft())]


def together() -> list[Models]:
    target = TrainersTarget()
    return [(target, Eagle(target))]


def drive(
    work: Callable[[Speculating], Coroutine[object, object, None]],
    trainers: list[Models] | None = None,
    config: SyncConfig = TRAINED,
    packs: bool = False,
    **settings: Any,
) -> None:
    fleet = Speculating(*(trainers or apart()), config=config, packs=packs, **settings)
    try:
        asyncio.run(work(fleet))
    finally:
        fleet.close()


@pytest.mark.parametrize("stage", ["none", "host"])
@pytest.mark.parametrize("packs", [False, True], ids=["live", "whole"])
@pytest.mark.parametrize("trainers", [apart, together])
def test_both_switch_in_one_version(trainers: Callable[[], list[Models]], packs: bool, stage: str) -> None:
    async def work(fleet: Speculating) -> None:
        await fleet.controller.connect()
        plan = fleet.controller.plan
        assert plan
        assert [meta.name for meta in plan.tensors] == [name for name, _ in fleet.engines["e0"].host.live()]
        for version, target, draft in ((1, True, True), (2, True, False), (3, False, True)):
            fleet.train(target=target, draft=draft)
            assert (await fleet.controller.update(version)).engines == {"e0": version, "e1": version}
            assert fleet.differing("e0") == fleet.differing("e1") == []

    drive(work, trainers(), replace(TRAINED, stage=stage), packs)


@pytest.mark.parametrize("trainers", [apart, together])
def test_models_may_be_replaced_and_their_weights_move(trainers: Callable[[], list[Models]]) -> None:
    async def work(fleet: Speculating) -> None:
        await fleet.controller.connect()
        for version in (1, 2):
            fleet.models = trainers()
            for source, models in zip(fleet.sources, fleet.models, strict=True):
                source.replace(models)
            assert (await fleet.controller.update(2 * version - 1)).engines["e0"] == 2 * version - 1
            assert fleet.differing("e0") == []
            norm = next(draft for _, draft in fleet.models if draft).norm
            norm.weight = nn.Parameter(torch.rand(WIDTH))
            assert (await fleet.controller.update(2 * version)).engines["e0"] == 2 * version
            assert fleet.differing("e0") == []
        norm.weight = nn.Parameter(torch.rand(WIDTH + 1))
        with pytest.raises(
            StateError, match=r"draft/norm\.weight is float32 \(257,\), and was .*connect\(\)"
        ):
            await fleet.controller.update(5)

    drive(work, trainers())


def test_both_are_offloaded_and_come_back() -> None:
    async def work(fleet: Speculating) -> None:
        await fleet.controller.connect()
        fleet.train()
        (source,) = fleet.sources
        values = [each.detach().clone() for each in parameters(fleet)]
        source.offload()
        assert not sum(each.untyped_storage().nbytes() for each in parameters(fleet))
        assert (await fleet.controller.update(1)).engines == {"e0": 1, "e1": 1}
        source.onload()
        assert all(map(torch.equal, parameters(fleet), values))
        assert fleet.differing("e0") == []

    drive(work, together(), offloads=True)


def parameters(fleet: Speculating) -> list[nn.Parameter]:
    return [each for models in fleet.models for model in models for each in model.parameters()]


def test_each_may_be_sharded(tmp_path: Path) -> None:
    """Of one rank: what FSDP has gathered for a forward pass is published as what it holds."""

    async def work(fleet: Speculating) -> None:
        await fleet.controller.connect()
        for version in (1, 2):
            fleet.train()
            for models in fleet.models:
                for model in models:
                    model.unshard()
            assert (await fleet.controller.update(version)).engines == {"e0": version, "e1": version}
            assert fleet.differing("e0") == []

    meeting = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        drive(work, [(fully_shard(TrainersTarget(), mesh=mesh), fully_shard(TrainersDraft(), mesh=mesh))])
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrong_byte_of_the_draft_commits_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.faults.active", Spoiling())

    async def work(fleet: Speculating) -> None:
        await fleet.controller.connect()
        fleet.train()
        await fleet.controller.update(1)
        fleet.train()
        fleet.engines["e1"].spoils = "draft/k.weight"
        report = await fleet.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 0}
        assert "draft/k.weight" in report.failures["e1"]
        assert fleet.fleet.engines["e1"].record.state is EngineState.STALE
        fleet.train()
        assert (await fleet.controller.update(3)).engines == {"e0": 3, "e1": 3}
        assert fleet.differing("e1") == []
        for engine in fleet.engines.values():
            engine.spoils = "draft/norm.bias"
        with pytest.raises(VerifyError, match=r"draft/norm\.bias"):
            await fleet.controller.update(4)
        assert fleet.controller.version == 3

    drive(work)


class Spoiling:
    """Faults that flip one bit of live memory, before an engine that is to be spoiled digests it."""

    def inject(self, at: str, *_: object) -> bool:
        if at == "verify" and (engine := LOADING.get()).spoils:
            live = dict(engine.host.live())[engine.spoils]
            live.detach().view(-1).view(torch.uint8)[-1] ^= 1
            engine.spoils = ""
        return False


@pytest.mark.parametrize("packs", [False, True], ids=["live", "whole"])
def test_an_engine_that_comes_back_is_refilled_with_both(packs: bool) -> None:
    async def work(fleet: Speculating) -> None:
        await fleet.controller.connect()
        fleet.train()
        await fleet.controller.update(1)
        await fleet.controller.snapshot_index.settled()
        fleet.engines["e1"].close()
        fleet.start("e1", holder=3)
        assert "draft/q.weight" in fleet.differing("e1")
        await fleet.controller.adopt("e1")
        await fleet.controller.refill("e1")
        assert fleet.differing("e1") == []
        assert fleet.engines["e1"].rank.layout().draft == Draft("fused", "a/draft", trained=True)

    drive(work, packs=packs)


TOWERS = {
    "covered": {},
    "frozen": {"frozen": ["up.weight"]},
    "missing": {"exclude": ["up.weight"]},
}
DRAFTS: dict[str, tuple[Components, Callable[[], nn.Module | None], str]] = {
    "trained": ({"draft": "trained"}, TrainersDraft, ""),
    "frozen": ({"draft": "frozen"}, lambda: None, ""),
    "missing": ({"draft": "trained"}, lambda: None, r"draft/"),
    "unsaid": ({}, lambda: None, r"engine e0: .*'fused'"),
}


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_each_part_is_covered_or_frozen_or_named(
    draft: str, tower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up.weight` stands for a tower: a part of the model that trainers hold, freeze or leave out."""
    monkeypatch.setattr("weightsync.faults.active", Spoiling())
    components, make_draft, missing = DRAFTS[draft]

    async def work(fleet: Speculating) -> None:
        if tower == "missing" or missing:
            lacking = filter(None, (missing, "up.weight" if tower == "missing" else ""))
            with pytest.raises((ConfigError, PlanError), match="|".join(lacking)):
                await fleet.controller.connect()
            assert fleet.controller.plan is None
            assert not any(engine.serving() for engine in fleet.engines.values())
            return
        await fleet.controller.connect()
        fleet.train()
        assert (await fleet.controller.update(1)).engines == {"e0": 1, "e1": 1}
        assert fleet.trained("e0") == fleet.trained("e1")
        for version, spoiled in ((2, "down.weight"), (3, "up.weight"), (4, "draft/norm.bias")):
            fleet.train(but="up.weight" if tower == "frozen" else "")
            fleet.engines["e1"].spoils = spoiled
            report = await fleet.controller.update(version)
            assert report.engines == {"e0": version, "e1": 0}, "not half of it"
            assert spoiled.removeprefix("draft/") in report.failures["e1"]
            assert fleet.trained("e0")
            if draft == "trained" or version < 4:  # a frozen draft comes back with a new process alone
                await fleet.controller.snapshot_index.settled()
                await fleet.controller.refill("e1")
                assert fleet.trained("e1")
                assert fleet.fleet.engines["e1"].record.version == version

    models: list[Models] = [(TrainersTarget(), make_draft())]
    drive(work, models, replace(CONFIG, components=components), **TOWERS[tower])


def test_a_draft_that_nobody_trains_is_refused_with_both_remedies() -> None:
    async def work(fleet: Speculating) -> None:
        with pytest.raises(
            PlanError, match=r"draft/.*register trainers that hold it.*\{\"draft\": \"frozen\"\}"
        ):
            await fleet.controller.connect()

    drive(work, [(TrainersTarget(), None)])


@pytest.mark.parametrize("components", [{}, {"draft": "frozen"}])
def test_a_draft_that_no_engine_takes_is_refused(components: Components) -> None:
    async def work(fleet: Speculating) -> None:
        if components:
            with pytest.raises(PlanError, match=r'draft/.*no engine takes one; .*\{"draft": "trained"\}'):
                await fleet.controller.connect()
        else:
            with pytest.raises(ConfigError, match=r'engine e0: .*"frozen".*"trained"'):
                await fleet.controller.connect()

    drive(work, config=replace(TRAINED, components=components))


def test_a_trainers_copy_of_what_the_draft_shares_is_refused_by_name() -> None:
    draft = TrainersDraft()
    draft.embed = nn.Embedding(6, WIDTH)

    async def work(fleet: Speculating) -> None:
        with pytest.raises(
            PlanError, match=r"draft/embed\.weight: the draft of engine e0 .*exclude=\['draft/em"
        ):
            await fleet.controller.connect()

    drive(work, [(TrainersTarget(), None), (None, draft)])


def test_a_draft_may_be_frozen_and_then_trained_and_then_frozen() -> None:
    async def work(fleet: Speculating) -> None:
        of_model, of_draft = fleet.fleet.trainers
        fleet.train()
        for version, config in ((1, FROZEN), (2, TRAINED), (3, FROZEN)):
            trains = config is TRAINED
            controller = fleet.take_over(config, [of_model, of_draft] if trains else [of_model])
            await controller.connect()
            fleet.train(draft=trains)
            assert (await controller.update(version)).engines == {"e0": version, "e1": version}
            held = [name for name in fleet.differing("e0") if name.startswith("draft/")]
            assert bool(held) is (version == 1), "it was written once"
            await controller.snapshot_index.settled()
        fleet.engines["e1"].host.drafting.norm.weight.data[0] += 1
        report = await controller.update(4)
        assert report.engines == {"e0": 4, "e1": 0}
        assert "draft norm.weight: bytes are not those" in report.failures["e1"]

    drive(work)


def test_an_engine_that_knows_no_components_cannot_train_its_draft() -> None:
    async def work(fleet: Speculating) -> None:
        layout = replace(fleet.engines["e0"].layout()[0], draft=Draft("own", "a/draft"))
        fleet.fleet.engines["e0"].peer = LocalEngine(Plain(layout))
        with pytest.raises(
            ConfigError, match=r"speculative_config of engine e0: .*'own'.*do not reach drafts"
        ):
            await fleet.controller.connect()

    drive(work)


class Plain(DictEngine):
    def __init__(self, layout: RankLayout) -> None:
        super().__init__("e0", {})
        self._layout = layout

    def layout(self) -> list[RankLayout]:
        return [self._layout]
