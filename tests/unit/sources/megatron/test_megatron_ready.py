"""Which parameter gathers are completed, with a stand-in for Megatron's data-parallel wrapper."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.megatron_standin import model_of
from weightsync.errors import StateError
from weightsync.sources.megatron import finish


class Group:
    def __init__(self, *, is_dispatched: bool, runs: bool = False) -> None:
        self.param_gather_dispatched = is_dispatched
        self.param_gather_handle = object() if runs else None
        self.calls: list[dict[str, bool]] = []

    def start_param_sync(self, **arguments: bool) -> None:
        self.calls.append(arguments)


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module, groups: list[Any], **settings: bool) -> None:
        super().__init__()
        self.module = module
        self.bucket_groups, self.expert_parallel_bucket_groups = groups[:1], groups[1:]
        defaults = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        self.ddp_config = SimpleNamespace(**{**defaults, **settings})

    def _make_forward_pre_hook(self) -> Any:
        def hook(*_: object) -> None: ...

        return hook

    def enable_forward_pre_hook(self) -> None:
        self.module.register_forward_pre_hook(self._make_forward_pre_hook())


@pytest.fixture(autouse=True)
def _megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(DistributedDataParallel=DistributedDataParallel)
    monkeypatch.setitem(sys.modules, "megatron.core.distributed", library)


def groups() -> list[Group]:
    return [
        Group(is_dispatched=False),
        Group(is_dispatched=True),
        Group(is_dispatched=True, runs=True),
        Group(is_dispatched=False),
    ]


def test_gathers_that_are_missing_or_run_are_completed_also_those_of_experts() -> None:
    made = groups()
    finish([DistributedDataParallel(model_of({}), made)])
    assert [len(group.calls) for group in made] == [1, 0, 1, 1]
    assert made[0].calls == [{"force_sync": True}]


def test_a_wrapper_may_be_within_another() -> None:
    class Outer(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    made = groups()
    finish(Outer(DistributedDataParallel(model_of({}), made)))
    assert [len(group.calls) for group in made] == [1, 0, 1, 1]


@pytest.mark.parametrize("setting", ["use_distributed_optimizer", "overlap_param_gather"])
def test_nothing_is_gathered_without_the_distributed_optimizer_or_overlap(setting: str) -> None:
    made = groups()
    finish(DistributedDataParallel(model_of({}), made, **{setting: False}))
    assert [group.calls for group in made] == [[]] * 4


def test_parameters_that_the_forward_pass_converts_are_refused() -> None:
    wrapper = DistributedDataParallel(model_of({}), groups(), reuse_grad_buf_for_mxfp8_param_ag=True)
    with pytest.raises(StateError, match="reuse_grad_buf_for_mxfp8_param_ag"):
        finish(wrapper)


def test_a_model_without_the_wrapper_that_gathers_its_parameters_is_refused() -> None:
    wrapper = DistributedDataParallel(model_of({}), groups())
    finish(wrapper.module)
    wrapper.enable_forward_pre_hook()
    with pytest.raises(StateError, match="give the model in that wrapper"):
        finish(wrapper.module)


def test_a_model_needs_no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core.distributed")
    finish(model_of({}))
