"""The tensors that transformers keeps in float32, whatever the dtype of a model is."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch

from weightsync.memory.tensors import named_tensors


@torch.no_grad()
def keep_float32(model: Any, dtype: torch.dtype) -> None:  # noqa: ANN401 - transformers' model
    """Give tensors of a model in `dtype` float32 if ``from_pretrained`` loads them so, such as router biases.

    ``from_config`` does not. The values are not read: weights come later.
    """
    kept: set[str] = set(_patterns(model, "_keep_in_fp32_modules_strict"))
    if dtype == torch.float16:
        kept.update(_patterns(model, "_keep_in_fp32_modules"))
    if not kept or dtype == torch.float32:
        return
    held = re.compile("|".join(f"(?:{each.replace('*', '.*')})" for each in sorted(kept)))
    for name, tensor in named_tensors(model)[0].items():
        if held.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _patterns(model: Any, attribute: str) -> Collection[str]:  # noqa: ANN401 - transformers' model
    return getattr(model, attribute, None) or ()
