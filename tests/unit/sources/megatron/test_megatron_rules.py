"""Rules and families: names with numbers in them."""

from __future__ import annotations

import pickle

import pytest

from weightsync.errors import ConfigError
from weightsync.sources.megatron import FAMILIES, Cut, Family, Rule, find_family


def test_a_rule_finds_the_numbers_of_layer_and_expert() -> None:
    found = FAMILIES["qwen3_moe"].match("decoder.layers.12.mlp.experts.local_experts.3.linear_fc2.weight")
    assert found.rule.names == ("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",)
    assert (found.layer_end, found.expert) == (len("decoder.layers.12"), 3)


def test_grouped_and_stacked_experts_are_told_apart() -> None:
    family = FAMILIES["mixtral"]
    grouped = family.match("decoder.layers.0.mlp.experts.linear_fc1.weight1")
    stacked = family.match("decoder.layers.0.mlp.experts.weight1")
    assert (grouped.rule.cut, grouped.expert) == (Cut.GATED, 1)
    assert stacked.rule.cut is Cut.STACKED_GATED
    assert stacked.rule.is_expert


def test_dots_in_names_are_dots() -> None:
    with pytest.raises(ConfigError, match="output_layer-weight"):
        FAMILIES["llama"].match("output_layer-weight")


def test_a_family_with_a_rule_for_the_same_parameter_replaces_it() -> None:
    mine = FAMILIES["llama"].extended("mine", Rule("output_layer.weight", "head", Cut.VOCABULARY))
    assert mine.match("output_layer.weight").rule.names == ("head",)
    assert mine.tensor("output_layer.weight") == "head"
    assert FAMILIES["llama"].tensor("output_layer.weight") == "lm_head.weight"
    assert mine.tensor("input_layer.weight") is None
    assert len(mine.rules) == len(FAMILIES["llama"].rules)


@pytest.mark.parametrize(
    ("tensors", "cut", "problem"),
    [
        ("one", Cut.GATED, "needs 2 names"),
        (("one", "two"), Cut.WHOLE, "needs 1 names"),
        ("layers.{number}.weight", Cut.WHOLE, r"\{number\}: give \{layer\} or \{expert\}"),
    ],
)
def test_a_wrong_rule_is_refused(tensors: str | tuple[str, ...], cut: Cut, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Rule("decoder.layers.{layer}.weight", tensors, cut)


def test_families_are_found_by_model_type_and_travel() -> None:
    mine = Family("mine", ())
    assert find_family(mine) is mine
    llama = find_family("llama")
    llama.match("output_layer.weight")
    assert pickle.loads(pickle.dumps(llama)) == llama


def test_no_family_has_two_rules_for_a_parameter() -> None:
    for family in FAMILIES.values():
        names = [rule.parameter for rule in family.rules]
        assert len(names) == len({*names}), family.name
