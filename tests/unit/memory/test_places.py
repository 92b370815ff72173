"""Tensors that lie elsewhere than when they were connected are noticed, however they came to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from weightsync.memory.addresses import AddressGuard
from weightsync.memory.tensors import named_tensors


def model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    made = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    made[2].weight = made[0].weight
    made[3].register_buffer("cache", torch.ones(3), persistent=False)
    return made


def guard(of: nn.Module) -> AddressGuard:
    return AddressGuard(of, named_tensors(of)[0])


def gone(of: nn.Sequential) -> None:
    del of[1][1]  # type: ignore[operator]


Change = Callable[[nn.Sequential], object]

CHANGES: dict[str, Change] = {
    "other memory": lambda m: setattr(m[1][0].weight, "data", m[1][0].weight.data.clone()),
    "other strides": lambda m: setattr(m[1][0].weight, "data", m[1][0].weight.data.t()),
    "another shape of the same bytes": lambda m: setattr(
        m[1][0].weight, "data", m[1][0].weight.data.view(2, 8)
    ),
    "fewer rows": lambda m: setattr(m[1][0].weight, "data", m[1][0].weight.data[:2]),
    "other dtype": lambda m: m.to(torch.bfloat16),
    "the same bytes as another dtype": lambda m: setattr(
        m[1][1].running_mean, "data", m[1][1].running_mean.data.view(torch.int32)
    ),
    "other parameter": lambda m: setattr(m[1][0], "weight", nn.Parameter(m[1][0].weight.detach().clone())),
    "other module": lambda m: m.__setitem__(1, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "another beside": lambda m: m.append(nn.Linear(4, 4)),
    "a child of a leaf": lambda m: m[0].add_module("inner", nn.Linear(1, 1)),
    "a module gone": gone,
    "a module under another name": lambda m: m.add_module("3", m._modules.pop("2")),
    "no bias any more": lambda m: setattr(m[0], "bias", None),
    "a bias where there was none": lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(4))),
    "another parameter beside": lambda m: m[0].register_parameter("scale", nn.Parameter(torch.ones(1))),
    "first of two tied": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "second of two tied": lambda m: setattr(m[2], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "tied": lambda m: setattr(m[3], "weight", m[0].weight),
    "other buffer": lambda m: setattr(m[1][1], "running_mean", torch.ones(4)),
    "another buffer": lambda m: m[0].register_buffer("steps", torch.ones(1)),
    "a buffer gone": lambda m: delattr(m[1][1], "running_var"),
    "a buffer that is saved from now on": lambda m: m[3]._non_persistent_buffers_set.clear(),
    "a buffer for one that is not saved": lambda m: (
        delattr(m[3], "cache"),
        m[3].register_buffer("kept", torch.ones(2)),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(change: str) -> None:
    made = model()
    asked = guard(made)
    assert asked.as_before(made)
    CHANGES[change](made)
    assert not asked.as_before(made)
    assert guard(made).as_before(made)


class Equal(nn.Linear):
    """Equal to all others of its class."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = nn.Module.__hash__


def test_another_module_is_noticed_though_it_says_that_it_is_equal() -> None:
    made = nn.Sequential(Equal(4, 4))
    asked = guard(made)
    made[0] = Equal(4, 4)
    assert not asked.as_before(made)


def test_another_module_is_noticed() -> None:
    made = model()
    assert not guard(made).as_before(model())


def test_other_values_and_buffers_that_are_not_saved_are_no_change() -> None:
    made = model()
    asked = guard(made)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.mul_(2)
    made[3].cache = torch.zeros(9)  # type: ignore[assignment]
    made.requires_grad_(False)
    assert asked.as_before(made)
    assert asked.moved(named_tensors(made)[0]) == []


def test_inference_mode_is_no_change() -> None:
    made = model()
    asked = guard(made)
    for mode in (True, False):
        with torch.inference_mode(mode):
            assert asked.as_before(made)
    CHANGES["fewer rows"](made)
    assert not asked.as_before(made)


def test_what_moved_is_named() -> None:
    made = model()
    asked = guard(made)
    CHANGES["other memory"](made)
    CHANGES["other buffer"](made)
    assert asked.moved(named_tensors(made)[0]) == ["1.0.weight", "1.1.running_mean"]


def test_tensors_that_only_a_hook_gives_are_asked_for_by_the_hook() -> None:
    made, given = nn.Linear(2, 2), {"extra": torch.ones(2)}
    made.register_state_dict_post_hook(lambda _module, state, _prefix, _meta: state.update(given))
    asked = guard(made)
    assert not asked.as_before(made)
    assert asked.moved(named_tensors(made)[0]) == []
    given["extra"] = torch.ones(2)
    assert asked.moved(named_tensors(made)[0]) == ["extra"]


def test_sharded_weights_may_be_gathered_but_not_move(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/m", rank=0, world_size=1)
    try:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sharded = fully_shard(made, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        asked = guard(made)
        assert asked.as_before(made)
        sharded.unshard()
        assert not asked.as_before(made)
        tensors = named_tensors(made)[0]
        assert asked.as_before(made)
        assert asked.moved(tensors) == []
        made[1].weight._local_tensor = made[1].weight.to_local().clone()  # type: ignore[assignment,operator]
        assert not asked.as_before(made)
        assert asked.moved(named_tensors(made)[0]) == ["1.weight"]
    finally:
        torch.distributed.destroy_process_group()
