"""The places of a compressed-tensors checkpoint with a scale for each row, in layers that SGLang transposed.

SGLang fills a matrix and its scales, and then gives the layer new parameters: the same memory, the matrix
transposed, without a loader. So no update goes through the loader: all of them write in place. The place of
each row is found by running the loader on parameters in their first form.

Sources: SGLang's ``layers/quantization/compressed_tensors/`` of 0.5.17.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weightsync.engines.loading.live_digest import parameters_of
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.stored_checkpoint import StoredCheckpoint
from weightsync.engines.sglang.created import Parameters, created_matrix, trace_created
from weightsync.quantising.stored_places import StoredPlaces


def trace_channels(
    model: torch.nn.Module,
    layers: Mapping[str, torch.nn.Module],
    checkpoint: StoredCheckpoint,
    dtype: torch.dtype,
    make_loader: Callable[[], Loader],
) -> StoredPlaces:
    """Find the places of a checkpoint's tensors in `model`.

    Weights do not change. Padding, as of a vocabulary, is filled, since no later load fills it.

    Args:
        layers: the layers with a transposed matrix, by path.
        dtype: the dtype of weights that are not quantised.

    Raises:
        UnprovableError: the loader does more than copy or does not write a byte, or SGLang does more with
            loaded tensors than view them; says where.
    """
    live = {name: each.detach() for name, each in parameters_of(model)}
    with torch.device("cpu"):  # memory that nobody touches
        created = {path: created_matrix(layer, dtype) for path, layer in layers.items()}
    loaded = {path: dict(made.named_parameters()) for path, made in created.items()}
    reload = trace_created(model, loaded, checkpoint.tensors, make_loader)
    for path, layer in layers.items():
        _require_views(path, layer, created[path], loaded[path])
    places = StoredPlaces(reload.segments, live, checkpoint.tensors, checkpoint.formats)
    places.are_right = True  # no loader could show it: it is proven that each element comes once
    with torch.no_grad():
        for _, view, value in reload.fills:
            view.fill_(value)
    return places


def _require_views(
    path: str,
    layer: Any,  # noqa: ANN401 - SGLang's
    made: torch.nn.Module,
    loaded: Parameters,
) -> None:
    """Raise UnprovableError unless SGLang's processing of `made` views loaded tensors, as in `layer`."""
    copy.copy(layer.quant_method).process_weights_after_loading(made)
    for leaf, before in loaded.items():
        each = made.get_parameter(leaf)
        if _memory(each) != _memory(before) or _form(each) != _form(layer.get_parameter(leaf)):
            raise UnprovableError(f"SGLang puts {path}.{leaf} in another order")


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
