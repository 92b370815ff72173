"""Tensors that lie elsewhere than when they were connected are noticed, however they came to."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from weightsync.errors import StateError
from weightsync.modules import named_tensors
from weightsync.places import Places


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    made[2].weight = made[0].weight
    return made


def places(of: nn.Module) -> Places:
    return Places(of, named_tensors(of)[0])


def other_memory(of: nn.Sequential) -> None:
    of[1][0].weight.data = of[1][0].weight.data.clone()  # type: ignore[index]


def other_parameter(of: nn.Sequential) -> None:
    of[1][0].weight = nn.Parameter(of[1][0].weight.detach().clone())  # type: ignore[index]


def other_module(of: nn.Sequential) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    inner[0].bias = of[1][0].bias  # type: ignore[index]
    inner[1] = of[1][1]  # type: ignore[index]
    of[1] = inner


def other_first_of_two_tied(of: nn.Sequential) -> None:
    of[0].weight = nn.Parameter(of[0].weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_memory, "1.0.weight"),
        (other_parameter, "1.0.weight"),
        (other_module, "1.0.weight"),
        (other_first_of_two_tied, "0.weight"),
    ],
)
def test_what_moved_is_named(change: Callable[[nn.Sequential], None], named: str) -> None:
    made = model()
    asked = places(made)
    asked.require_unmoved()
    change(made)
    with pytest.raises(StateError, match=f"^{re.escape(named)} is in other memory"):
        asked.require_unmoved()


def test_a_buffer_that_moved_is_named_and_other_values_are_no_move() -> None:
    made = model()
    asked = places(made)
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.mul_(2)
    asked.require_unmoved()
    made[1][1].running_mean = torch.ones(4)  # type: ignore[index]
    with pytest.raises(StateError, match=r"1\.1\.running_mean"):
        asked.require_unmoved()


def test_tensors_that_only_a_hook_gives_are_asked_for_by_the_hook() -> None:
    made, given = nn.Linear(2, 2), {"extra": torch.ones(2)}
    made.register_state_dict_post_hook(lambda _module, state, _prefix, _meta: state.update(given))
    asked = places(made)
    asked.require_unmoved()
    given["extra"] = torch.ones(2)
    with pytest.raises(StateError, match="extra is in other memory"):
        asked.require_unmoved()


def test_sharded_weights_may_be_gathered_but_not_move(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/m", rank=0, world_size=1)
    try:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sharded = fully_shard(made, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        asked = places(made)
        asked.require_unmoved()
        sharded.unshard()
        assert not asked._as_before()  # so that the next line does show something
        asked.require_unmoved()
        made[1].weight._local_tensor = made[1].weight.to_local().clone()  # type: ignore[assignment,operator]
        with pytest.raises(StateError, match=r"1\.weight is in other memory"):
            asked.require_unmoved()
    finally:
        torch.distributed.destroy_process_group()
