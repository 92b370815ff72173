"""Proves that quantising here gives the same bytes as SGLang's quantising at its start.

SGLang's own method quantises a random layer of each size that the model has.

Sources: SGLang's ``layers/quantization/fp8.py`` and ``w8a8_fp8.py`` of 0.5.17.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.quantised.online_places import STACKS, are_same, random_matrix
from weightsync.engines.sglang.created import created_stacks
from weightsync.engines.sglang.online import EXPERT, ROWS
from weightsync.quantising.quantize import quantize, quantize_together

_MOST_ROWS = 2560
"""Of a random matrix. SGLang has one kernel for fewer than 16 rows a multiprocessor, and one for more."""
_GATE_AND_UP = replace(EXPERT, together=("gate_proj", "up_proj"))


def require_its_bytes(layers: Mapping[str, torch.nn.Module], dtype: torch.dtype) -> None:
    """Raise UnprovableError unless SGLang's own method gives our bytes, for each size of layer."""
    seen: set[tuple[object, ...]] = set()
    for path, layer in layers.items():
        is_stack = hasattr(layer, STACKS[0])
        weight: Any = layer.w2_weight if is_stack else layer.weight
        size = type(layer.quant_method), is_stack, *_size(weight)
        if size in seen:
            continue
        seen.add(size)
        if not (_makes_experts if is_stack else _makes_rows)(layer, dtype):
            gpu = torch.cuda.get_device_name(weight.device) if weight.is_cuda else "a CPU"
            problem = f"SGLang quantises a random matrix like its own to other bytes than are known, on {gpu}"
            raise UnprovableError(f"{path}: {problem}. Those of Hopper GPUs are known")
        if weight.is_cuda:
            torch.cuda.empty_cache()  # trainers on the same GPU may need it


def _size(weight: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of a transposed matrix, as many as are compared, or of an expert."""
    if weight.ndim == 3:
        return weight.shape[1], weight.shape[2]
    return min(weight.shape[1], _MOST_ROWS), weight.shape[0]


def _makes_rows(layer: Any, dtype: torch.dtype) -> bool:  # noqa: ANN401 - SGLang's
    """Return True if the method of a layer makes our bytes of a random matrix."""
    matrix = random_matrix(*_size(layer.weight), layer.weight.device, dtype)
    made: Any = torch.nn.Module()
    made.weight = torch.nn.Parameter(matrix, requires_grad=False)
    copy.copy(layer.quant_method).process_weights_after_loading(made)
    values, scales = (each for _, each in quantize(matrix, ROWS))
    return are_same(made.weight.t(), values) and are_same(made.weight_scale.t(), scales)


def _makes_experts(layer: Any, dtype: torch.dtype) -> bool:  # noqa: ANN401 - SGLang's
    """Return True if the method of a layer makes our bytes of a random expert."""
    with torch.device(layer.w2_weight.device):
        made: Any = created_stacks(layer, 1, dtype)
    made.num_local_experts = 1
    gate_up, down = made.w13_weight.data[0], made.w2_weight.data[0]
    for matrix in (gate_up, down):
        rows, columns = matrix.shape
        matrix.copy_(random_matrix(rows, columns, matrix.device, dtype))
    copy.copy(layer.quant_method).process_weights_after_loading(made)
    (gate, scale), (up, _) = (
        [each for _, each in stored] for stored in quantize_together(gate_up.chunk(2), [_GATE_AND_UP] * 2)
    )
    wanted = {"w13": (torch.cat([gate, up]), scale), "w2": tuple(each for _, each in quantize(down, EXPERT))}
    return all(
        are_same(getattr(made, f"{name}_weight")[0], values)
        and are_same(getattr(made, f"{name}_weight_scale"), scale)
        for name, (values, scale) in wanted.items()
    )
