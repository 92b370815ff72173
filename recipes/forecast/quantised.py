"""Describes the formats of a model's tensors on a quantised engine."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from weightsync.errors import ConfigError
from weightsync.plan import Layout, TensorMeta
from weightsync.plan.direct.stored_reads import cuts_block
from weightsync.plan.layout.formats import FIELD, Format, Quantization, unproven
from weightsync.plan.layout.layout import Int64
from weightsync.text import count_text, size_text

INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head"],
}
"""The ``quantization_config`` of a recipe's int4 engines."""

_OTHERS = ("embed_tokens.weight", "mlp.gate.weight")
"""Matrices that are not linear layers: the embedding, and routers."""


def read_quantization(given: str) -> Quantization:
    """Read the format of a `quantization_config`. Raises ConfigError for an unknown format."""
    return Quantization.read(quantization_config(given))


def quantization_config(given: str) -> dict[str, Any]:
    """Return the ``quantization_config`` of a config.json, or of a YAML file like it.

    Raises:
        ConfigError: it is no such file.
    """
    path = Path(given)
    if not os.path.isfile(path):
        raise ConfigError("--quantization", given, "give a model's config.json, or a YAML file like it")
    try:
        config = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("--quantization", given, f"it is neither JSON nor YAML: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get(FIELD), dict):
        raise ConfigError("--quantization", given, f"it has no {FIELD}; give a quantised model's config.json")
    found: dict[str, Any] = config[FIELD]
    return found


def _format_of(meta: TensorMeta, quantization: Quantization) -> Format | None:
    is_linear = meta.name.endswith(".weight") and len(meta.shape) == 2 and not meta.name.endswith(_OTHERS)
    return quantization.of(meta.name) if is_linear else None


def formats_text(tensors: Sequence[TensorMeta], quantization: Quantization) -> str:
    """Return the number of tensors by format, such as ``28 become int4 with a scale for 1 x 32``."""
    forms = (_format_of(meta, quantization) for meta in tensors)
    counts = Counter(str(form) for form in forms if form)
    return ", ".join(f"{count} become {form}" for form, count in counts.items())


def why_whole(engine: Layout, quantization: Quantization) -> str:
    """Return why the ranks of an engine take whole tensors; "" if each rank can read only its part.

    A rank can if it has all elements of each scale, and kernels read values as a checkpoint stores them.
    """
    numbers: defaultdict[Format, list[int]] = defaultdict(list)
    for number, meta in enumerate(engine.tensors):
        if form := _format_of(meta, quantization):
            numbers[form].append(number)
    for form, its in numbers.items():
        if form.packed or form.powers_of_two or not form.block[0]:
            return f"the engine's loader stores {form}"
        held = np.flatnonzero(np.isin(engine.tensor, its))
        tensor, first = engine.tensor[held], engine.offset[held, :2]
        end, whole = first + engine.extent[held, :2], engine.shape[tensor, :2]
        cut = cuts_block(first, end, whole, np.where(form.block, form.block, whole))
        if cut.any():
            return f"a rank has only a part of a scale's block in {engine.names[tensor[cut.argmax()]]}"
    return ""


def explain_formats(
    tensors: Sequence[TensorMeta], quantization: Quantization, *, in_parts: bool
) -> list[str]:
    """Return a line with the bytes of each format, and a line for tensors that stay.

    `in_parts`: each engine rank reads only its part.

    Raises:
        PlanError: a weight does not fit its format.
    """
    refusals: dict[str, None] = {}
    alike: defaultdict[tuple[Format | None, str, tuple[int, ...]], list[TensorMeta]] = defaultdict(list)
    for meta in tensors:
        form = _format_of(meta, quantization)
        if form and (why := unproven(meta.name, form)):
            refusals[f"{why}: connect() refuses it"] = None
        alike[form, meta.dtype, meta.shape].append(meta)
    groups: defaultdict[str, Int64] = defaultdict(lambda: np.zeros(4, np.int64))
    for (form, dtype, _), metas in alike.items():
        first = metas[0]
        values, *others = form.stored(first) if form else (first,)
        sizes = 1, first.nbytes, values.nbytes, sum(each.nbytes for each in others)
        groups[f"become {form}" if form else f"stay {dtype}"] += len(metas) * np.array(sizes)
    lines = []
    for change, (count, whole, of_values, of_scales) in groups.items():
        lines.append(f"{count_text(count, 'tensor')} {change}: {size_text(of_values)}")
        if change.startswith("become"):
            lines[-1] += f", scales {size_text(of_scales)}, in place of {size_text(whole)}"
    way = "each engine rank gets whole tensors by broadcast, quantised on its own device"
    if in_parts:
        way = "each engine rank's holder reads what the rank keeps, and quantises it on its device"
    return [*lines, *(refusals or [way])]
