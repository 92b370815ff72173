"""Experts of SGLang as they were before it quantised them to FP8.

Sources: SGLang's ``layers/quantization/fp8.py`` and ``layers/moe/fused_moe_triton/layer.py`` of 0.5.17.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from weightsync.plan.layout.formats import Format

EXPERT = Format(rule="sglang_experts", values="float8_e4m3fn", block=(0, 0))
"""SGLang's format of an expert in a stack. A rank that keeps a part has a scale of that part."""


def created_stacks(
    layer: Any,  # noqa: ANN401 - SGLang's
    num_experts: int,
    dtype: torch.dtype,
) -> torch.nn.Module:
    """Return stacks of `num_experts` as the method of `layer` creates them, on torch's default device."""
    made = torch.nn.Module()
    _, columns, width = layer.w2_weight.shape
    copy.copy(layer.quant_method).create_weights(
        layer=made,
        num_experts=num_experts,
        hidden_size=columns,
        intermediate_size_per_partition=width,
        params_dtype=dtype,
        weight_loader=layer.weight_loader,
    )
    return made
