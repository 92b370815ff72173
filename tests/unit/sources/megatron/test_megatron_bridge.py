"""Names of mbridge and of Megatron-Bridge, on stand-ins of what they answer to a parameter's name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.megatron_standin import Place, model_of
from weightsync.errors import ConfigError
from weightsync.memory.tensors import segment_view
from weightsync.sources.megatron import Cut, MegatronSource, Rule, find_family, local_weights

LAYER = "decoder.layers.{layer}."
CONFIG = SimpleNamespace(model_type="new", vocab_size=11)


def convert(*_: Any) -> Any: ...


convert.__module__ = "mbridge.core.bridge"


class MBridge:
    """What mbridge's bridges have: numbers of the whole model in and out, and no public call for names."""

    hf_config = CONFIG

    def _weight_name_mapping_mcore_to_hf(self, parameter: str) -> list[str]:
        layer = parameter.split(".")[2]
        if parameter == "embedding.word_embeddings.weight":
            return ["wte.weight"]
        if parameter == "mtp.layers.0.enorm.weight":
            return ["h.9.enorm.weight"]
        if found := re.search(r"mlp\.experts\.linear_fc([12])\.weight(\d+)", parameter):
            leaves = ("gate_proj", "up_proj") if found[1] == "1" else ("down_proj",)
            return [f"h.{int(layer)}.mlp.experts.{found[2]}.{leaf}.weight" for leaf in leaves]
        for leaf, names in {
            "linear_qkv.weight": ("q", "k", "v"),
            "linear_qkv.layer_norm_weight": ("ln",),
            "new_norm.weight": ("new",),
        }.items():
            if parameter.endswith(leaf):
                return [f"h.{int(layer)}.{name}" for name in names]
        raise NotImplementedError(parameter)

    _weight_to_hf_format = convert


class AutoMapping:
    def __init__(self, hf_param: Any, permute_dims: Any = None) -> None:
        self.hf_param, self.permute_dims = hf_param, permute_dims


class QKVMapping(AutoMapping): ...


class RMSNorm2ZeroCenteredRMSNormMapping(AutoMapping): ...


@dataclass
class AutoBridge:
    """What Megatron-Bridge's AutoBridge has: a registry, and the checkpoint's configuration or model."""

    hf_pretrained: Any

    @property
    def _model_bridge(self) -> Any:
        return SimpleNamespace(mapping_registry=lambda: self)

    def megatron_to_hf_lookup(self, parameter: str) -> Any:
        layer = (re.search(r"\d+", parameter) or [""])[0]
        return {
            "embedding.word_embeddings.weight": AutoMapping("wte.weight"),
            f"decoder.layers.{layer}.self_attention.linear_qkv.weight": QKVMapping(
                {each: f"h.{layer}.{each}" for each in "qkv"}
            ),
            f"decoder.layers.{layer}.turned.weight": AutoMapping("turned", permute_dims=(1, 0)),
            f"decoder.layers.{layer}.centred.weight": RMSNorm2ZeroCenteredRMSNormMapping("centred"),
        }.get(parameter)


@pytest.mark.parametrize(
    "bridge", [MBridge(), AutoBridge(CONFIG), AutoBridge(SimpleNamespace(config=CONFIG))]
)
def test_a_bridges_names_are_cut_as_megatron_cuts(bridge: Any) -> None:
    tensors = {
        "embedding.word_embeddings.weight": torch.randn(6, 8),
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.randn(8, 8),
    }
    model = model_of(tensors, first_layer=3, groups={"tp": Place(1, 2)})
    source = MegatronSource(model, family=bridge)
    layout = source.layout()
    assert {meta.name: meta.shape for meta in layout.tensors} == {
        "wte.weight": (11, 8),
        "h.3.q": (8, 8),
        "h.3.k": (4, 8),
        "h.3.v": (4, 8),
    }
    assert layout.stage
    assert layout.stage.shared == ("wte.weight",)
    views = {
        segment.tensor: segment_view(model.get_parameter(segment.buffer), segment)
        for segment in layout.segments
    }
    assert torch.equal(views["wte.weight"], tensors["embedding.word_embeddings.weight"][:5])
    assert torch.equal(views["h.3.k"], tensors["decoder.layers.0.self_attention.linear_qkv.weight"][4:6])


EXPERT = "h.{layer}.mlp.experts.{expert}."
RULES = {
    "decoder.layers.2.mlp.experts.linear_fc1.weight3": Rule(
        f"{LAYER}mlp.experts.linear_fc1.weight{{expert}}",
        (f"{EXPERT}gate_proj.weight", f"{EXPERT}up_proj.weight"),
        Cut.GATED,
    ),
    "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight": Rule(
        f"{LAYER}mlp.experts.local_experts.{{expert}}.linear_fc2.weight",
        (f"{EXPERT}down_proj.weight",),
        Cut.COLUMNS,
    ),
    "decoder.layers.2.input_layernorm.weight": Rule(f"{LAYER}input_layernorm.weight", ("h.{layer}.ln",)),
    "decoder.layers.2.new_norm.weight": Rule(f"{LAYER}new_norm.weight", ("h.{layer}.new",)),
    "mtp.layers.0.enorm.weight": Rule("mtp.layers.0.enorm.weight", ("h.9.enorm.weight",)),
}


@pytest.mark.parametrize("parameter", RULES)
def test_a_bridge_is_asked_with_numbers_of_the_whole_model(parameter: str) -> None:
    match = find_family(MBridge()).match(parameter)
    assert (match.rule, match.expert) == (RULES[parameter], 3 if "experts" in parameter else 0)
    assert parameter[: match.layer_end] == ("" if parameter.startswith("mtp") else "decoder.layers.2")


def test_rules_of_ones_own_come_before_the_bridge() -> None:
    own = Rule(f"{LAYER}input_layernorm.weight", "mine.{layer}")
    mine = find_family(MBridge()).extended("mine", own)
    assert mine.match("decoder.layers.0.input_layernorm.weight").rule == own
    assert mine.match("decoder.layers.0.new_norm.weight").rule.names == ("h.{layer}.new",)
    assert mine.tensor("embedding.word_embeddings.weight") == "wte.weight"
    assert mine.tensor("output_layer.weight") is None


class Changing(MBridge):
    def _weight_to_hf_format(self, *_: Any) -> Any: ...


@pytest.mark.parametrize(
    ("bridge", "parameter", "message"),
    [
        (
            MBridge(),
            "other.weight",
            r"a name of .*MBridge: 'decoder\.layers\.0\.other\.weight' .*trainers\.md",
        ),
        (AutoBridge(CONFIG), "other.weight", r"a name of .*AutoBridge: 'decoder\.layers\.0\.other\.weight'"),
        (AutoBridge(CONFIG), "turned.weight", r"AutoMapping of .*turned\.weight: .*changes values or their"),
        (AutoBridge(CONFIG), "centred.weight", r"ZeroCenteredRMSNormMapping of .* give a Family with rules"),
        (Changing(), "new_norm.weight", r"family: '.*Changing' .*changes values"),
        (object(), "new_norm.weight", r"family: 'builtins\.object' .*mbridge or Megatron-Bridge"),
    ],
)
def test_what_a_bridge_does_not_know_or_changes_is_refused(bridge: Any, parameter: str, message: str) -> None:
    model = model_of({f"decoder.layers.0.{parameter}": torch.randn(4, 8)})
    with pytest.raises(ConfigError, match=message):
        local_weights(model, bridge, vocab_size=11)
