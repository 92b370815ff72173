"""Layers in the form before SGLang processed them, which SGLang's loader can fill.

Once weights are loaded, SGLang gives some quantised layers new parameters, which have no loader.

Sources: SGLang's ``layers/linear.py``, ``layers/quantization/fp8.py`` and
``layers/moe/fused_moe_triton/layer.py`` of 0.5.17.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weightsync.engines.loading.live_digest import parameters_of, require_complete
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.reload_trace import Reload, trace_reload
from weightsync.engines.loading.whole_sink import Loader
from weightsync.errors import TransportError
from weightsync.plan import TensorMeta

Parameters = Mapping[str, torch.nn.Parameter]
"""The parameters of a layer, by the last parts of their names."""

_NEWER_LOADERS = ("Fp8LinearMethod", "CompressedTensorsLinearMethod")
"""Methods that give weights the layer's ``weight_loader_v2``, if it has one; others ``weight_loader``."""


def created_matrix(layer: Any, dtype: torch.dtype) -> torch.nn.Module:  # noqa: ANN401 - SGLang's
    """Return the parameters that a layer's method creates for loading, on torch's default device.

    The matrix of `layer` is already transposed. `dtype` is the dtype of weights that are not quantised.
    """
    columns, rows = layer.weight.shape
    method, made = copy.copy(layer.quant_method), _blank(layer)
    vars(made)["scheme"] = getattr(layer, "scheme", None)
    is_newer = type(method).__name__ in _NEWER_LOADERS and hasattr(layer, "weight_loader_v2")
    load = layer.weight_loader_v2 if is_newer else layer.weight_loader
    method.create_weights(made, columns, [rows], columns, rows, dtype, weight_loader=load)
    return made


def created_stacks(
    layer: Any,  # noqa: ANN401 - SGLang's
    num_experts: int,
    dtype: torch.dtype,
) -> torch.nn.Module:
    """Return stacks of `num_experts` as the method of `layer` creates them, on torch's default device."""
    made = _blank(layer)
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


def _blank(layer: torch.nn.Module) -> torch.nn.Module:
    """Return a layer without parameters, buffers and modules, and otherwise with the attributes of `layer`.

    Methods read some of them: from 0.5.23 on, ``moe_tp_size`` and ``moe_runner_config``.
    """
    made = torch.nn.Module()
    vars(made).update({name: each for name, each in vars(layer).items() if name not in vars(made)})
    return made


def trace_created(
    model: torch.nn.Module,
    created: Mapping[str, Parameters],
    tensors: Sequence[TensorMeta],
    make_loader: Callable[[], Loader],
    later: Collection[str] = (),
) -> Reload:
    """Run a load of `tensors`, which changes nothing, on layers that hold `created`.

    Args:
        created: the parameters that replace the layers' present parameters, by the layers' paths.
        later: the names of parameters that layers get after the load.

    Raises:
        UnprovableError: the loader does more than copy, or does not write a byte; says where.
    """
    try:
        require_complete(model)
    except TransportError as error:
        raise UnprovableError(str(error)) from error
    with _holding(model, created):
        before = {name: each.detach() for name, each in parameters_of(model) if name not in later}
        reload = trace_reload(model, before, tensors, make_loader)
    names = {f"{path}.{leaf}" for path, its in created.items() for leaf in its}
    if padded := next((name for name, _, _ in reload.fills if name in names), ""):
        raise UnprovableError(f"its loader pads {padded}, which it quantises")
    return reload


@contextmanager
def _holding(model: torch.nn.Module, created: Mapping[str, Parameters]) -> Iterator[None]:
    """Have layers hold `created` in place of their own parameters."""
    layers = {path: model.get_submodule(path) for path in created}
    live = {path: {leaf: layers[path].get_parameter(leaf) for leaf in its} for path, its in created.items()}
    try:
        _hold(layers, created)
        yield
    finally:
        _hold(layers, live)


def _hold(layers: Mapping[str, torch.nn.Module], parameters: Mapping[str, Parameters]) -> None:
    for path, its in parameters.items():
        for leaf, parameter in its.items():
            setattr(layers[path], leaf, parameter)
