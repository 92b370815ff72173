"""Which tensors of a checkpoint are those of MTP layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.fleets.draft_trainer import module_of
from weightsync.engines.vllm.mtp import held_in_float32, prefixes, tensors_of
from weightsync.plan import TensorMeta


def config(architecture: str) -> SimpleNamespace:
    return SimpleNamespace(architectures=[architecture], num_hidden_layers=46, num_nextn_predict_layers=2)


def header(*shape: int, dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def holder(*names: str) -> nn.Module:
    """Return a module that holds these in float32, and the projection in bfloat16."""
    held = {name: torch.zeros(1) for name in names}
    return module_of({**held, "model.layers.46.eh_proj.weight": torch.zeros(1, dtype=torch.bfloat16)})


def test_layers_are_numbered_on_or_by_themselves() -> None:
    assert prefixes(config("Glm4MoeMTPModel")) == ("model.layers.46.", "model.layers.47.")
    assert prefixes(config("MiMoMTPModel")) == ("model.mtp_layers.0.", "model.mtp_layers.1.")
    assert prefixes(config("DeepSeekMTPModel")) == ("model.layers.46.", "model.layers.47.")
    assert prefixes(SimpleNamespace(architectures=["ErnieMTPModel"])) == ()


def test_tensors_are_those_of_the_layers_with_experts_stacked() -> None:
    begin = "model.layers.46."
    experts = {
        f"{begin}mlp.experts.{number}.{leaf}_proj.weight": header(*shape)
        for number in (0, 1)
        for leaf, shape in (("gate", (2, 4)), ("up", (2, 4)), ("down", (4, 2)))
    }
    module = holder(f"{begin}mtp_block.mlp.gate.weight", f"{begin}mtp_block.mlp.gate.e_score_correction_bias")
    headers = {
        "model.layers.4.mlp.gate.weight": header(8, 4),
        "model.layers.461.mlp.gate.weight": header(8, 4),
        f"{begin}eh_proj.weight": header(4, 8),
        f"{begin}mlp.gate.weight": header(2, 4),
        f"{begin}mlp.gate.e_score_correction_bias": header(2, dtype="F32"),
        **experts,
    }
    wide = held_in_float32(module)
    assert set(tensors_of(headers, (begin,), "float16", wide)) == {
        TensorMeta(f"{begin}eh_proj.weight", "float16", (4, 8)),
        TensorMeta(f"{begin}mlp.gate.weight", "float32", (2, 4)),
        TensorMeta(f"{begin}mlp.gate.e_score_correction_bias", "float32", (2,)),
        TensorMeta(f"{begin}mlp.experts.gate_up_proj", "float16", (2, 4, 4)),
        TensorMeta(f"{begin}mlp.experts.down_proj", "float16", (2, 4, 2)),
    }
