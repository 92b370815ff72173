"""Trainers whose models are wrapped, and engines that know the names without wrappers, or with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from tests.fleets.loop import CONFIG, Loop, drive
from weightsync.errors import ConfigError, PlanError
from weightsync.memory.tensors import named_tensors
from weightsync.sources import make_source
from weightsync.sources.module import ModuleSource


class Model(nn.Module):
    """A tied head, and a block that may be wrapped by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class Child(nn.Module):
    """Has a model as a child of some name."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(name, model)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def in_a_block(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = Model()
    model.block = wrap(model.block)
    return model


def adapted(**settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["block.0"], init_lora_weights=False, **settings)
    made: nn.Module = peft.get_peft_model(Model(), config)
    return made


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    """The process group of one rank, which DDP and FSDP1 want."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def update(model: nn.Module, served: nn.Module, **settings: Any) -> Mapping[str, torch.Tensor]:
    """Return what an engine that serves a model like `served` has after an update from `model`."""
    found: dict[str, torch.Tensor] = {}

    class Wrapped(Loop):
        def make(self) -> nn.Module:
            return served

        def source_of(self, _: nn.Module) -> ModuleSource:
            source = make_source(model, **settings)
            assert isinstance(source, ModuleSource)
            return source

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        assert (await loop.controller.update(1)).verified
        found.update({name: each.clone() for name, each in loop.engines["e0"].tensors.items()})

    drive(work, CONFIG, Wrapped)
    return found


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "torch.compile": lambda: torch.compile(Model()),  # type: ignore[dict-item,return-value]
    "torch.compile of a block": lambda: in_a_block(torch.compile),
    "DDP": lambda: DistributedDataParallel(Model()),
    "DDP of torch.compile": lambda: DistributedDataParallel(torch.compile(Model())),  # type: ignore[arg-type]
    "activation checkpoints": lambda: in_a_block(checkpoint_wrapper),
    "children with these names": lambda: Child(
        "_orig_mod", in_a_block(lambda block: Child("_checkpoint_wrapped_module", Child("module", block)))
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_names_of_wrappers_are_taken_off(wrapper: str) -> None:
    model = WRAPPERS[wrapper]()
    found = update(model, Model())
    wanted = [*named_tensors(model)[0].values()]
    for each, tensor in zip(Model().state_dict(), [*wanted, wanted[0]], strict=True):
        assert torch.equal(found[each], tensor), each


@pytest.mark.parametrize("name", ["module", "_orig_mod"])
def test_an_engine_that_has_such_names_itself_takes_them(name: str) -> None:
    model = Child(name, Model())
    found = update(model, Child(name, Model()))
    assert all(torch.equal(found[each], tensor) for each, tensor in model.state_dict().items())


def test_two_tensors_never_get_one_name() -> None:
    model = Model()
    model.add_module("module", nn.Sequential())
    model.module.add_module("block", nn.Sequential(nn.Linear(4, 4)))  # type: ignore[operator,union-attr]
    found = update(model, model)
    assert all(torch.equal(found[each], tensor) for each, tensor in model.state_dict().items())


def test_one_tensor_is_never_sent_as_two() -> None:
    served = nn.ModuleDict({"a": nn.Linear(2, 2), "module": nn.ModuleDict({"a": nn.Linear(2, 2)})})
    with pytest.raises(PlanError, match=r"^module\.a\.weight: the engine needs it, no trainer"):
        update(nn.ModuleDict({"module": nn.ModuleDict({"a": nn.Linear(2, 2)})}), served)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_patterns_are_of_names_with_or_without_wrappers(prefix: str) -> None:
    model = Model()
    model.add_module("value", nn.Linear(4, 1))
    found = update(Child("module", model), Model(), exclude=[f"{prefix}value.*"])
    assert torch.equal(found["block.0.weight"], model.block[0].weight)


OWN = {
    "its own": (lambda: Child("policy", Model()), '{"policy.": ""}'),
    "its own, compiled": (lambda: torch.compile(Child("policy", Model())), '{"_orig_mod.policy.": ""}'),
}


@pytest.mark.parametrize("wrapper", OWN)
def test_for_another_wrapper_the_error_says_what_to_write(wrapper: str) -> None:
    make, says = OWN[wrapper]
    model: Any = make()
    with pytest.raises(PlanError) as caught:
        update(model, Model())
    assert str(caught.value).endswith(f"; give TrainerShard names={says}")
    names = json.loads(says)
    ((prefix, _),) = names.items()
    assert torch.equal(
        update(model, Model(), names=names)["embed.weight"], model.get_parameter(f"{prefix}embed.weight")
    )


def test_a_prefix_that_only_engines_have_is_said_too() -> None:
    with pytest.raises(PlanError) as caught:
        update(Model(), Child("model", Model()))
    assert str(caught.value).endswith('; give TrainerShard names={"": "model."}')
    update(Model(), Child("model", Model()), names={"": "model."})


def test_what_to_leave_out_is_said() -> None:
    model = Model()
    model.add_module("value", nn.Linear(4, 1))
    with pytest.raises(PlanError, match=r'leave it out by exclude=\["value\.\*"\], or rename it'):
        update(model, Model())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile, DistributedDataParallel])
def test_a_peft_model_is_sent_with_its_adapter_or_not_at_all(wrap: Callable[[nn.Module], Any]) -> None:
    model = wrap(adapted())
    with pytest.raises(
        PlanError, match=r'it is a PEFT model with an adapter: give TrainerShard merge="default"'
    ):
        update(model, Model())
    with pytest.raises(PlanError, match="it is a PEFT model"):
        update(model, Model(), exclude=["*lora_*"])
    found = update(model, Model(), merge="default")
    held = {name.rpartition("base_model.model.")[2]: each for name, each in named_tensors(model)[0].items()}
    a, b = (held[f"block.0.lora_{side}.default.weight"] for side in "AB")
    merged = held["block.0.base_layer.weight"] + b @ a * 4.0
    assert torch.allclose(found["block.0.weight"], merged)
    assert torch.equal(found["embed.weight"], held["embed.weight"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_parameters_that_fsdp1_shards_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.block = FullyShardedDataParallel(  # type: ignore[assignment]
        model.block, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    assert torch.equal(update(model, Model())["embed.weight"], model.embed.weight), "it is whole on each rank"
    monkeypatch.setattr(model.block, "sharding_strategy", ShardingStrategy.FULL_SHARD)
    with pytest.raises(
        ConfigError, match=r"FSDP1 shards block in flat parameters, .*: use fully_shard \(FSDP2\)"
    ):
        update(model, Model())
