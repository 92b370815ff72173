"""The code of docs/trainers.md for Megatron-Core."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.megatron_standin import Place, model_of

PAGE = Path(__file__).parents[4] / "docs" / "trainers.md"


def run(number: int) -> dict[str, Any]:
    """The names that a block of the page defines."""
    block = re.findall(r"^```python\n(.+?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)[number]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_a_trainer_sets_the_source() -> None:
    model = model_of({"output_layer.weight": torch.zeros(16, 8)})
    trainer = run(0)["Trainer"](model, SimpleNamespace(model_type="llama", vocab_size=11))
    (meta,) = trainer.sync_layout().tensors
    assert (meta.name, meta.shape) == ("lm_head.weight", (11, 8))


def test_a_family_of_ones_own() -> None:
    family, home = run(1)["qwen2_moe"], "decoder.layers.0.mlp.shared_experts."
    parameters = {
        f"{home}linear_fc1.weight": torch.zeros(6, 8),
        f"{home}linear_fc2.weight": torch.zeros(8, 3),
        f"{home}gate_weight": torch.zeros(1, 8),
    }
    source = run(0)["MegatronSource"](
        model_of(parameters, groups={"tp": Place(0, 2)}), family=family, vocab_size=11
    )
    shapes = {meta.name.removeprefix("model.layers.0.mlp."): meta.shape for meta in source.layout().tensors}
    assert shapes == {
        "shared_expert.gate_proj.weight": (6, 8),
        "shared_expert.up_proj.weight": (6, 8),
        "shared_expert.down_proj.weight": (8, 6),
        "shared_expert_gate.weight": (1, 8),
    }
