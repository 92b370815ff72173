"""FP8 that SGLang makes of full-precision weights when it starts: where it lives, and whose bytes it has.

SGLang quantises a layer once, and gives it parameters that its loader cannot fill again: the matrix in FP8,
transposed, and a scale for each of its rows. So no update goes through the loader: all of them quantise into
these parameters in place. Where each row goes is found by running the loader on parameters as the layer first
had them. That our bytes are SGLang's is shown by its own method, on a random matrix of each size.

Sources: SGLang's ``layers/quantization/fp8.py``, ``w8a8_fp8.py`` and ``layers/linear.py`` of 0.5.17.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.engines.checkpoint import Checkpoint
from weightsync.engines.live_digest import parameters_of, require_complete
from weightsync.engines.loader_trace import UnprovableError
from weightsync.engines.quantizing_loader import stored_tensors
from weightsync.engines.reload_trace import trace_reload
from weightsync.engines.stored_checkpoint import StoredCheckpoint
from weightsync.engines.whole_sink import Loader
from weightsync.errors import TransportError
from weightsync.memory.quantize import quantize
from weightsync.memory.stored_places import StoredPlaces
from weightsync.plan import Box, Segment, TensorMeta
from weightsync.plan.formats import Format

ROWS = Format(rule="sglang", values="float8_e4m3fn", block=(1, 0))
"""What SGLang makes of a matrix. A rank that keeps some columns has scales of these alone."""

_LOADERS = {"Fp8LinearMethod": "weight_loader_v2"}
"""The loader that a layer gives its weight, by its method. Without one here: ``weight_loader``."""

_MOST_ROWS = 2560
"""Of a random matrix. SGLang has one kernel for fewer than 16 rows a multiprocessor, and one for more."""


def require_its_bytes(layers: Mapping[str, torch.nn.Module], dtype: torch.dtype) -> None:
    """Raise UnprovableError unless `ROWS` gives the bytes of SGLang's own method, for each size of matrix."""
    seen: set[tuple[type, int, int]] = set()
    for path, layer in layers.items():
        weight: Any = layer.weight
        method: Any = layer.quant_method
        columns, rows = weight.shape
        size = type(method), min(rows, _MOST_ROWS), columns
        if size in seen:
            continue
        seen.add(size)
        matrix = _random(*size[1:], weight.device, dtype)
        made: Any = torch.nn.Module()
        made.weight = torch.nn.Parameter(matrix, requires_grad=False)
        copy.copy(method).process_weights_after_loading(made)
        values, scales = (each for _, each in quantize(matrix, ROWS))
        if not (_are_same(made.weight.t(), values) and _are_same(made.weight_scale.t(), scales)):
            gpu = torch.cuda.get_device_name(matrix.device) if matrix.is_cuda else "a CPU"
            problem = f"SGLang quantises a random matrix like its own to other bytes than are known, on {gpu}"
            raise UnprovableError(f"{path}: {problem}. Those of Hopper GPUs are known")
        if matrix.is_cuda:
            del matrix, made, values, scales
            torch.cuda.empty_cache()  # trainers on the same GPU may need it


def trace_online(
    model: torch.nn.Module,
    layers: Mapping[str, torch.nn.Module],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    make_loader: Callable[[], Loader],
) -> tuple[StoredCheckpoint, StoredPlaces]:
    """Find what SGLang has quantised of a full-precision checkpoint, and where it lives.

    No weights change, but padding, as of a vocabulary, is filled: no later load does it.

    Args:
        layers: those that it quantised, of the form that `require_online` accepts.
        dtype: of their weights before.

    Raises:
        UnprovableError: its loader does more than copy, or leaves a byte as it was; says where.
    """
    live = {name: each.detach() for name, each in parameters_of(model)}
    try:
        require_complete(model)
    except TransportError as error:
        raise UnprovableError(str(error)) from error
    whole = stored_tensors(checkpoint, {})
    scales = {f"{path}.weight_scale" for path in layers}
    with _as_before(layers, dtype):
        before = {name: each.detach() for name, each in parameters_of(model) if name not in scales}
        reload = trace_reload(model, before, whole, make_loader)
    if padded := next((name for name, _, _ in reload.fills if name.removesuffix(".weight") in layers), ""):
        raise UnprovableError(f"its loader pads {padded}, which it quantises")
    found = _Found.of(reload.segments, whole, layers, dtype)
    made = StoredCheckpoint(found.formats, stored_tensors(checkpoint, found.formats))
    places = StoredPlaces(found.segments, live, made.tensors, found.formats)
    places.are_right = True  # no loader could show it: it is proven that each row of a layer comes once
    with torch.no_grad():
        for _, view, value in reload.fills:
            view.fill_(value)
    return made, places


@contextmanager
def _as_before(layers: Mapping[str, torch.nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Have layers hold weights as before SGLang quantised them: of host memory that nobody touches."""
    live = [(layer, layer.weight) for layer in layers.values()]
    try:
        for layer, _ in live:
            layer.weight = _created(layer, dtype)
        yield
    finally:
        for layer, weight in live:
            layer.weight = weight


def _created(layer: Any, dtype: torch.dtype) -> torch.nn.Parameter:  # noqa: ANN401 - SGLang's
    """Return a weight as the layer's method creates it, with the layer's own loader."""
    columns, rows = layer.weight.shape
    method, made = copy.copy(layer.quant_method), torch.nn.Module()
    load = getattr(layer, _LOADERS.get(type(method).__name__, ""), None) or layer.weight_loader
    with torch.device("cpu"):
        method.create_weights(made, columns, [rows], columns, rows, dtype, weight_loader=load)
    weight: torch.nn.Parameter = made.weight  # type: ignore[assignment]
    return weight


@dataclass(frozen=True, slots=True)
class _Found:
    """The places of a quantised checkpoint in live parameters, and the formats of what it has quantised."""

    segments: Sequence[Segment]
    formats: Mapping[str, Format]

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
        found: list[Segment] = []
        formats: dict[str, Format] = {}
        for segment in segments:
            path = segment.buffer.removesuffix(".weight")
            if path not in layers or path == segment.buffer:
                found.append(segment)
                continue
            form = _format(segment, shapes[segment.tensor], layers[path], dtype)
            if formats.setdefault(segment.tensor, form) != form:
                raise UnprovableError(f"{segment.tensor} is cut in two ways")
            found += _quantised(segment, path, form, dtype)
        return cls(found, formats)


def _format(segment: Segment, shape: Sequence[int], layer: Any, dtype: torch.dtype) -> Format:  # noqa: ANN401
    """Return the format of a tensor of which a segment lives in `layer`, before it is quantised, in `dtype`.

    Raises UnprovableError if its rows are not rows of the layer, or share scales with other ranks' columns.
    """
    columns, box = layer.weight.shape[0], segment.box
    steps = zip(box.extent, segment.strides, (columns * dtype.itemsize, dtype.itemsize), strict=False)
    is_rows = box.ndim == 2 and all(size == 1 or stride == step for size, stride, step in steps)
    if not is_rows or box.extent[1] != columns or segment.byte_offset % (columns * dtype.itemsize):
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


def _random(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a random matrix, with rows of different sizes."""
    draw = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(rows, columns, generator=draw, device=device, dtype=dtype)
    return matrix.mul_(torch.logspace(-4, 1, rows, device=device).to(dtype).unsqueeze(1))


def _are_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether both have the same dtype, shape and bits."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (found, wanted)))
