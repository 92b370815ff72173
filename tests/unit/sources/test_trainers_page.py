"""The code of docs/trainers.md, with stand-ins for what trains."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.megatron_standin import Place, model_of
from tests.pages import run_block
from weightsync import Part, TrainerShard
from weightsync.sources.megatron import MegatronSource

CONFIG = SimpleNamespace(model_type="llama", vocab_size=11)


class Auto:
    """A model, or its configuration, in a folder."""

    @staticmethod
    def from_pretrained(path: str) -> Any:
        assert path == "folder"
        return nn.Linear(2, 3)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for what the page imports, to be filled by a test."""
    transformers = SimpleNamespace(AutoModelForCausalLM=Auto)
    deepspeed = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "transformers", transformers)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda module: module)
    return SimpleNamespace(transformers=transformers, deepspeed=deepspeed)


def layout(trainer: TrainerShard) -> dict[str, tuple[int, ...]]:
    return {meta.name: meta.shape for meta in trainer.sync_layout().rank_layout().tensors}


@pytest.mark.usefixtures("modules")
def test_a_plain_module() -> None:
    assert layout(run_block("docs/trainers.md", 0)["Trainer"]("folder")) == {"weight": (3, 2), "bias": (3,)}


def test_deepspeeds_engine(modules: SimpleNamespace) -> None:
    def initialize(model: nn.Module, model_parameters: Any, config: str) -> tuple[Any, ...]:
        assert list(model_parameters) == list(model.parameters())
        assert config == "its own"
        return model, None, None, None

    modules.deepspeed.initialize = initialize
    assert isinstance(run_block("docs/trainers.md", 1)["Trainer"]("folder", "its own").model, nn.Linear)


def test_megatrons_model_and_its_configuration(modules: SimpleNamespace) -> None:
    class Configuration:
        from_pretrained = staticmethod(lambda path: CONFIG)

    chunk = model_of({"output_layer.weight": torch.zeros(16, 8)})
    chunk.__class__ = type(
        "MegatronModule", (type(chunk),), {"__module__": "megatron.core.transformer.module"}
    )
    modules.transformers.AutoConfig = Configuration
    trainer = run_block("docs/trainers.md", 2)["Trainer"]([chunk], "folder")
    assert layout(trainer) == {"lm_head.weight": (11, 8)}


def test_a_family_of_ones_own() -> None:
    family, home = run_block("docs/trainers.md", 3)["qwen2_moe"], "decoder.layers.0.mlp.shared_experts."
    parameters = {
        f"{home}linear_fc1.weight": torch.zeros(6, 8),
        f"{home}linear_fc2.weight": torch.zeros(8, 3),
        f"{home}gate_weight": torch.zeros(1, 8),
    }
    source = MegatronSource(model_of(parameters, groups={"tp": Place(0, 2)}), family=family, vocab_size=11)
    shapes = {meta.name.removeprefix("model.layers.0.mlp."): meta.shape for meta in source.layout().tensors}
    assert shapes == {
        "shared_expert.gate_proj.weight": (6, 8),
        "shared_expert.up_proj.weight": (6, 8),
        "shared_expert.down_proj.weight": (8, 6),
        "shared_expert_gate.weight": (1, 8),
    }


def test_a_bridges_names() -> None:
    model = model_of({"output_layer.weight": torch.zeros(16, 8)})
    head = type("AutoMapping", (), {"hf_param": "head.weight"})()
    registry = SimpleNamespace(megatron_to_hf_lookup={"output_layer.weight": head}.get)
    bridge = SimpleNamespace(
        get_model=lambda: [model],
        hf_pretrained=CONFIG,
        _model_bridge=SimpleNamespace(mapping_registry=lambda: registry),
    )
    assert layout(run_block("docs/trainers.md", 4)["Trainer"](bridge)) == {"head.weight": (11, 8)}


def test_names_and_patterns() -> None:
    trainer = run_block("docs/trainers.md", 5)["Trainer"]("folder")
    policy = nn.ModuleDict({"norm": nn.LayerNorm(2)})
    trainer.model = nn.ModuleDict({"policy": policy, "value_head": nn.Linear(2, 1)})
    assert layout(trainer) == {"norm.weight": (2,), "norm.bias": (2,)}


def test_parts_of_stacks() -> None:
    names = run_block("docs/trainers.md", 6)["names"]
    gate, up = (names(f"layers.3.moe.experts.{leaf}") for leaf in ("w1", "w3"))
    assert (gate.tensor, gate.shape) == ("model.layers.3.mlp.experts.gate_up_proj", (128, 1536, 2048))
    assert (gate.offset, up.offset) == ((0, 0, 0), (0, 768, 0))
    down = Part("model.layers.3.mlp.experts.down_proj", (128, 2048, 768))
    assert names("layers.3.moe.experts.w2") == down
    assert names("norm.weight") == "norm.weight"
