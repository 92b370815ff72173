"""The places of FP8 that SGLang makes of full-precision weights when it starts.

SGLang quantises a layer once, and gives it parameters that SGLang's loader cannot fill again: the matrix in
FP8, transposed, and a scale per row; or experts in FP8, with two scales per expert. So no update goes through
the loader: all updates quantise into these parameters in place. The place of each row is found by running the
loader on parameters in their first form. `online_proof` compares bytes with SGLang's.

Sources: SGLang's ``layers/quantization/fp8.py``, ``w8a8_fp8.py`` and ``layers/linear.py`` of 0.5.17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.live_digest import parameters_of
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.online_places import STACKS, ScaledMatrix, is_whole_rows, online_places
from weightsync.engines.quantised.quantizing_loader import stored_tensors
from weightsync.engines.quantised.stored_checkpoint import StoredCheckpoint
from weightsync.engines.sglang.created import Parameters, created_matrix, created_stacks, trace_created
from weightsync.plan import Box, Segment
from weightsync.plan.layout.formats import Format
from weightsync.quantising.stored_places import StoredPlaces

ROWS = Format(rule="sglang", values="float8_e4m3fn", block=(1, 0))
"""SGLang's format of a matrix. A rank that keeps some columns has scales only of these columns."""
EXPERT = Format(rule="sglang_experts", values="float8_e4m3fn", block=(0, 0))
"""SGLang's format of an expert in a stack. A rank that keeps a part has a scale of that part."""


def trace_online(
    model: torch.nn.Module,
    layers: Mapping[str, torch.nn.Module],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    make_loader: Callable[[], Loader],
) -> tuple[StoredCheckpoint, StoredPlaces]:
    """Find the tensors of a full-precision checkpoint that SGLang has quantised, and their places.

    Weights do not change. Padding, as of a vocabulary, is filled, since no later load fills it.

    Args:
        layers: the quantised layers, of the form that `require_online` accepts.
        dtype: the dtype of their weights before quantising.

    Raises:
        UnprovableError: SGLang's loader does more than copy, or does not write a byte; says where.
    """
    live = {name: each.detach() for name, each in parameters_of(model)}
    whole = stored_tensors(checkpoint, {})
    with torch.device("cpu"):  # memory that nobody touches
        created = {path: _created(layer, dtype) for path, layer in layers.items()}
    scales = {f"{path}.{leaf}_scale" for path, layer in layers.items() for leaf in _weights(layer)}
    reload = trace_created(model, created, whole, make_loader, later=scales)
    made, places = online_places(reload.segments, checkpoint, live, partial(_owner, layers, dtype))
    places.are_right = True  # no loader could show it: it is proven that each row of a layer comes once
    with torch.no_grad():
        for _, view, value in reload.fills:
            view.fill_(value)
    return made, places


def _weights(layer: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of a layer that hold FP8. Scales have theirs with ``_scale``."""
    return STACKS if hasattr(layer, STACKS[0]) else ("weight",)


def _created(layer: Any, dtype: torch.dtype) -> Parameters:  # noqa: ANN401 - SGLang's
    """Return the weights as the method of a layer creates them."""
    if _weights(layer) == STACKS:
        made = created_stacks(layer, len(layer.w13_weight), dtype)
    else:
        made = created_matrix(layer, dtype)
    return {leaf: made.get_parameter(leaf) for leaf in _weights(layer)}


def _owner(
    layers: Mapping[str, torch.nn.Module], dtype: torch.dtype, segment: Segment
) -> _Rows | ScaledMatrix | None:
    """Return the layer or expert that quantises a segment; `dtype` is from before quantising."""
    path, _, leaf = segment.buffer.rpartition(".")
    layer: Any = layers.get(path)
    if layer is None or leaf not in _weights(layer):
        return None
    if leaf in STACKS:
        return ScaledMatrix.at(segment, getattr(layer, leaf), dtype, EXPERT)
    return _Rows(segment.buffer, layer.weight.shape[0], dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A linear layer before it was quantised with a scale for each row."""

    buffer: str
    columns: int
    itemsize: int

    def formats(
        self, its: Sequence[Segment], shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[Segment, Format]]:
        """Yield `its` segments with the format of their tensor.

        Raises UnprovableError if a tensor's rows are not rows of the layer, or share scales with other ranks'
        columns.
        """
        for segment in its:
            if not is_whole_rows(segment, self.columns, self.itemsize):
                raise UnprovableError(f"{self.buffer} has rows that are not those of {segment.tensor}")
            width = shapes[segment.tensor][1]
            if width % self.columns or segment.box.offset[1] % self.columns:
                raise UnprovableError(
                    f"{self.buffer}: ranks keep unequal numbers of columns of {segment.tensor}"
                )
            yield segment, ROWS if width == self.columns else replace(ROWS, block=(1, self.columns))

    def places(self, segment: Segment, form: Format) -> Iterator[Segment]:
        """Yield where the values and the scales of a segment live."""
        box, start = segment.box, segment.byte_offset // self.itemsize
        yield Segment(segment.tensor, box, self.buffer, start, (self.columns, 1))
        name = segment.tensor.removesuffix("weight") + form.scale_suffix
        of_box = Box((box.offset[0], box.offset[1] // self.columns), (box.extent[0], 1))
        yield Segment(name, of_box, f"{self.buffer}_scale", start // self.columns * 4, (4, 4))
