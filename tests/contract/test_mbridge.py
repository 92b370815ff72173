"""mbridge's names are those of our rules, and both are found for the same parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from transformers import AutoConfig

from weightsync.errors import ConfigError
from weightsync.sources.megatron import FAMILIES, find_family

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 103}
UNKNOWN: dict[str, tuple[str, ...]] = {
    "llama": (),
    "qwen2": (),
    "qwen3": (),
    "qwen3_moe": (
        "experts.weight1",
        "experts.weight2",
        ".mlp.linear_fc1.weight",
        ".mlp.linear_fc2.weight",
        "mlp.linear_fc1.layer_norm_weight",
    ),
}
"""Families, and ends of parameters that mbridge does not know: stacks, and dense layers among experts."""


@pytest.fixture(scope="module")
def mbridge() -> Any:
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("mbridge")


def bridge_of(mbridge: Any, model_type: str, **settings: Any) -> Any:
    from mbridge.core.parallel_states import ParallelStates

    config = AutoConfig.for_model(model_type, **SIZES, **settings)
    config.rope_theta = 10000.0
    return mbridge.AutoBridge.from_config(config, parallel_states=ParallelStates())


@pytest.mark.parametrize("family", UNKNOWN)
def test_its_names_are_ours(mbridge: Any, family: str) -> None:
    bridged, compared = find_family(bridge_of(mbridge, family)), 0
    for rule in FAMILIES[family].rules:
        parameter = rule.parameter.format(layer=1, expert=2)
        if parameter.endswith(UNKNOWN[family]):
            with pytest.raises(ConfigError, match="a name of"):
                bridged.match(parameter)
            continue
        found = bridged.match(parameter)
        ours = FAMILIES[family].match(parameter)
        assert (found.rule.names, found.rule.cut) == (rule.names, rule.cut), parameter
        assert (found.layer_end > 0, found.expert) == (ours.layer_end > 0, ours.expert), parameter
        compared += 1
    assert compared > 10


def test_a_family_without_rules_has_its_names(mbridge: Any) -> None:
    bridged = find_family(bridge_of(mbridge, "qwen2_moe", num_key_value_heads=2))
    shared = bridged.match("decoder.layers.1.mlp.shared_experts.linear_fc1.weight")
    assert shared.rule.names[0] == "model.layers.{layer}.mlp.shared_expert.gate_proj.weight"
    gate = bridged.match("decoder.layers.1.mlp.shared_experts.gate_weight")
    assert gate.rule.names == ("model.layers.{layer}.mlp.shared_expert_gate.weight",)


def test_bridges_that_change_values_are_refused(mbridge: Any) -> None:
    from mbridge.models.gemma3 import Gemma3Bridge

    with pytest.raises(ConfigError, match="changes values"):
        find_family(object.__new__(Gemma3Bridge))
