"""Whether a vLLM rank has a draft, and one with real weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.engines.vllm.draft import draft_of
from weightsync.errors import ConfigError

CPU = torch.device("cpu")


def runner(draft: nn.Module | None, method: str | None = "eagle") -> Any:
    model = SimpleNamespace(model="a/draft")
    speculative = method and SimpleNamespace(method=method, model="given", draft_model_config=model)
    config = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, enable_eplb=False),
    )
    return SimpleNamespace(vllm_config=config, get_model=target, get_draft_model=lambda: draft)


TARGET = nn.Linear(2, 2)


def target() -> nn.Module:
    return TARGET


def dummy() -> nn.Module:
    draft = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    for parameter in draft.parameters():
        nn.init.uniform_(parameter, -1e-3, 1e-3)
    return draft


@pytest.mark.parametrize("method", [None, "ngram", "ngram_gpu", "suffix"])
def test_speculation_without_weights_has_no_draft(method: str | None) -> None:
    assert draft_of(runner(None, method), CPU, "frozen") is None


def test_a_draft_with_weights_is_named_by_its_checkpoint() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    draft = draft_of(runner(model), CPU, "frozen")
    assert draft
    assert (draft.method, draft.path, draft.model) == ("eagle", "a/draft", model)


def test_versions_that_have_no_method_for_it_have_an_attribute() -> None:
    older = runner(None)
    del older.get_draft_model
    older.drafter = SimpleNamespace(model=nn.LayerNorm(2))
    draft = draft_of(older, CPU, "frozen")
    assert draft
    assert draft.model is older.drafter.model


def test_a_draft_that_is_nowhere_is_refused_unless_another_stage_has_it() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config: .*custom_class.* are not found"):
        draft_of(runner(None, "custom_class"), CPU, "frozen")
    first = runner(None)
    first.vllm_config.parallel_config.pipeline_parallel_size = 2
    assert draft_of(first, CPU, "frozen") is None


def test_dummy_weights_beside_shared_ones_are_refused() -> None:
    draft = dummy()
    draft.append(TARGET)
    with pytest.raises(ConfigError, match=r"draft_load_config: .* the draft has dummy weights, and shares"):
        draft_of(runner(draft), CPU, "frozen")


def test_float8_weights_are_no_reason_to_take_a_draft_for_a_dummy_one() -> None:
    model = nn.Sequential(nn.LayerNorm(2), nn.Identity())
    model[1].weight = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
    assert draft_of(runner(model), CPU, "frozen")


def test_experts_of_a_draft_that_move_are_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(2), nn.Identity())
    model[1].w13_weight = nn.Parameter(torch.ones(2))
    serving = runner(model)
    assert draft_of(serving, CPU, "frozen")
    serving.vllm_config.parallel_config.enable_eplb = True
    with pytest.raises(ConfigError, match=r"enable_eplb: True .* it moves experts of the draft"):
        draft_of(serving, CPU, "frozen")
