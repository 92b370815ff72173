"""The places of FP8 that SGLang makes of full-precision weights when it starts.

SGLang quantises a layer once, and gives it parameters that SGLang's loader cannot fill again: the matrix in
FP8, transposed, and a scale per row; or experts in FP8, with two scales per expert. So no update goes through
the loader: all updates quantise into these parameters in place. The place of each row is found by running the
loader on parameters in their first form. `online_proof` compares bytes with SGLang's.

Sources: SGLang's ``layers/quantization/fp8.py``, ``w8a8_fp8.py`` and ``layers/linear.py`` of 0.5.17.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.live_digest import parameters_of
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.traced_rows import is_whole_rows
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.quantised_experts import STACKS, Expert
from weightsync.engines.quantised.quantizing_loader import stored_tensors
from weightsync.engines.quantised.stored_checkpoint import StoredCheckpoint
from weightsync.engines.sglang.created import Parameters, created_matrix, trace_created
from weightsync.engines.sglang.online_experts import EXPERT, created_stacks
from weightsync.plan import Box, Segment, TensorMeta
from weightsync.plan.layout.formats import Format
from weightsync.quantising.stored_places import StoredPlaces

ROWS = Format(rule="sglang", values="float8_e4m3fn", block=(1, 0))
"""SGLang's format of a matrix. A rank that keeps some columns has scales only of these columns."""


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
    found = _Found.of(reload.segments, whole, layers, dtype)
    made = StoredCheckpoint(found.formats, stored_tensors(checkpoint, found.formats))
    places = StoredPlaces(found.segments, live, made.tensors, found.formats)
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


@dataclass(frozen=True, slots=True)
class _Found:
    """The places of a quantised checkpoint in live parameters, and the formats of quantised tensors."""

    segments: list[Segment]
    formats: dict[str, Format]

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        whole: Sequence[TensorMeta],
        layers: Mapping[str, torch.nn.Module],
        dtype: torch.dtype,
    ) -> _Found:
        """Make it of the places of full-precision tensors, of which `layers` quantise some."""
        shapes = {meta.name: meta.shape for meta in whole}
        found = cls([], {})
        experts = defaultdict[Expert, list[Segment]](list)
        for segment in segments:
            path, _, leaf = segment.buffer.rpartition(".")
            layer = layers.get(path)
            if layer is None or leaf not in _weights(layer):
                found.segments.append(segment)
            elif leaf in STACKS:
                experts[Expert.at(segment, getattr(layer, leaf), dtype, EXPERT)].append(segment)
            else:
                form = _format(segment, shapes[segment.tensor], layer, dtype)
                found._add(segment.tensor, form, _quantised(segment, path, form, dtype))
        for expert, its in experts.items():
            for segment, form in expert.formats(its, shapes):
                found._add(segment.tensor, form, expert.places(segment, form))
        return found

    def _add(self, tensor: str, form: Format, places: Iterable[Segment]) -> None:
        """Add the places of a quantised tensor. Raises UnprovableError if the tensor has two formats."""
        if self.formats.setdefault(tensor, form) != form:
            raise UnprovableError(f"{tensor} is cut in two ways")
        self.segments.extend(places)


def _format(segment: Segment, shape: Sequence[int], layer: Any, dtype: torch.dtype) -> Format:  # noqa: ANN401
    """Return the format of a tensor with a segment in `layer`; `dtype` is from before quantising.

    Raises UnprovableError if the tensor's rows are not rows of the layer, or share scales with other ranks'
    columns.
    """
    columns, box = layer.weight.shape[0], segment.box
    if not is_whole_rows(segment, columns, dtype.itemsize):
        raise UnprovableError(f"{segment.buffer} has rows that are not those of {segment.tensor}")
    if columns == shape[1]:
        return ROWS
    if shape[1] % columns or box.offset[1] % columns:
        raise UnprovableError(f"{segment.buffer}: ranks keep unequal numbers of columns of {segment.tensor}")
    return Format(rule=ROWS.rule, values=ROWS.values, block=(1, columns))


def _quantised(segment: Segment, path: str, form: Format, dtype: torch.dtype) -> Iterator[Segment]:
    """Yield where the values and the scales of a segment live."""
    box, columns = segment.box, segment.box.extent[1]
    start = segment.byte_offset // dtype.itemsize
    yield Segment(segment.tensor, box, segment.buffer, start, (columns, 1))
    name, scales = segment.tensor.removesuffix("weight") + form.scale_suffix, f"{path}.{form.scale_suffix}"
    of_box = Box((box.offset[0], box.offset[1] // columns), (box.extent[0], 1))
    yield Segment(name, of_box, scales, start // columns * 4, (4, 4))
