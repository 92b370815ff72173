"""Quantises matrices on a GPU to words of 4 or 8 bits a value, with a scale for each group of columns.

One kernel finds scales and zero points, another kernel makes the words. Both read the matrix once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from weightsync.memory import cuda
from weightsync.plan.layout.formats import Format
from weightsync.plan.layout.segment import TensorMeta
from weightsync.quantising.quantize_kernels import DTYPES

_RULES = {
    ("compressed-tensors", "int4", True): "compressed",
    ("compressed-tensors", "int4", False): "compressed",
    ("compressed-tensors", "int8", True): "compressed",
    ("compressed-tensors", "int8", False): "compressed",
    ("awq", "int4", False): "awq",
    ("gptq", "int4", True): "gptq",
    ("gptq", "int8", True): "gptq",
}
"""First parts of kernels' names, by the rule, the values, and True without zero points."""
_NUM_THREADS = 256  # kQuantizers in kernels.cu
_STRIP, _CHUNK = 8, 32  # kStrip and kChunk: rows, and groups a row, whose scales a thread block finds
_TILE = 64, 128  # kTileRows and kTileColumns, for which a thread block makes words
_GPTQ_ZEROS = {4: 0x77777777, 8: 0x7F7F7F7F}
"""Words of GPTQ's zero points minus one, as in the first version of the format."""


def can_quantize_groups(weight: torch.Tensor, form: Format) -> bool:
    """Return True if the kernels accept a matrix.

    It must be contiguous, on a GPU, and no word may cross two groups.
    """
    is_known = form.packed and form.block[0] == 1 and (form.rule, form.values, form.symmetric) in _RULES
    is_held = weight.is_cuda and weight.dtype in DTYPES and weight.is_contiguous() and weight.numel() > 0
    if not (is_known and is_held):
        return False
    columns, group = weight.shape[1], form.block[1]
    return group in (0, columns) or (columns % group == 0 and group % (32 // form.num_bits) == 0)


def quantize_groups(weight: torch.Tensor, form: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `weightsync.quantising.quantize.quantize`, made on the current stream.

    Args:
        weight: which `can_quantize_groups` accepts.
    """
    meta = TensorMeta("layer.weight", str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
    stored = {
        suffix: torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=weight.device)
        for suffix, each in zip(form.suffixes, form.stored(meta), strict=True)
    }
    group = form.block[1] or weight.shape[1]
    if form.rule == "gptq":
        stored["qzeros"].fill_(_GPTQ_ZEROS[form.num_bits])
        stored["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device) // group
    elif form.rule == "compressed-tensors":
        stored["weight_shape"] = torch.tensor(weight.shape, device=weight.device)
    scales, words = stored[form.scale_suffix], stored[form.suffixes[0]]
    zero_points = None if form.symmetric else stored["qzeros" if form.rule == "awq" else "weight_zero_point"]
    _launch("scales", weight, form, (_STRIP, _CHUNK * group), scales, zero_points)
    _launch("words", weight, form, _TILE, scales, zero_points, words)
    yield from stored.items()


def _launch(
    kind: str, weight: torch.Tensor, form: Format, tile: tuple[int, int], *memory: torch.Tensor | None
) -> None:
    """Start a kernel with a thread block for each tile of the matrix."""
    down, across = (-(-size // part) for size, part in zip(weight.shape, tile, strict=True))
    sizes = (np.int64(size) for size in (*weight.shape, form.block[1] or weight.shape[1]))
    source, *pointers = (np.uint64(0 if each is None else each.data_ptr()) for each in (weight, *memory))
    rule = _RULES[form.rule, form.values, form.symmetric]
    with torch.cuda.device(weight.device):
        cuda.launch(
            f"{rule}_{kind}_{form.values}_{DTYPES[weight.dtype]}",
            torch.cuda.current_stream(),
            down * across,
            _NUM_THREADS,
            (source, *sizes, *pointers),
        )
