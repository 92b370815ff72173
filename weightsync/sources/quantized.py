"""Quantises the linear layers of a module, as a quantised checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.memory.addresses import local_tensor
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.formats import MICROSCALING, NEAREST, Format, Quantization
from weightsync.plan.wrappers import unwrapped
from weightsync.quantising.quantize import quantize
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.readable import require_values

DTYPE = "bfloat16"
"""The dtype from which weights are quantised, as engines do."""

_FIELD = "quantization"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The format of a quantised weight, and buffers for this rank's rows by suffix."""

    form: Format
    buffers: Mapping[str, torch.Tensor]


class Quantized:
    """A `Transform` with which each rank quantises its rows of linear layers.

    Engines have to use the same format. Bytes do not depend on how the model is cut: each rank holds whole
    blocks.
    """

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """`quantization` is the ``quantization_config`` of the engines.

        Raises ConfigError if the format is not known.
        """
        self._quantization = Quantization.read(quantization)
        self._matrices: dict[str, _Matrix] = {}
        self._buffers: dict[str, torch.Tensor] = {}

    def apply(self, model: nn.Module, weights: LocalWeights) -> LocalWeights:
        """Return the layout of a quantised checkpoint, see `Transform`.

        Raises ConfigError if a format needs more than a rank's rows, PlanError for a tensor without values.
        """
        layout, live = weights.layout, weights.tensors
        require_values(layout, live)
        forms = self._forms(model, layout)
        metas = {meta.name: meta for meta in layout.tensors}
        stored = {name: forms[name].stored(replace(metas[name], dtype=DTYPE)) for name in forms}
        segments: list[Segment] = []
        for segment in layout.segments:
            if segment.tensor in forms:
                device = local_tensor(live[segment.buffer]).device
                segments += self._cut(segment, metas[segment.tensor], forms[segment.tensor], stored, device)
            else:
                segments.append(segment)
        tensors = tuple(each for meta in layout.tensors for each in stored.get(meta.name, (meta,)))
        frozen = tuple(each.name for name in layout.frozen for each in stored.get(name, (metas[name],)))
        layout = replace(layout, tensors=tensors, segments=tuple(segments), frozen=frozen)
        return replace(weights, layout=layout, computed={**weights.computed, **self._buffers})

    @torch.no_grad()
    def run(self, model: nn.Module, live: Mapping[str, torch.Tensor]) -> None:
        """Quantise this rank's rows, as they are now."""
        for name, matrix in self._matrices.items():
            rows = local_tensor(live[name]).to(getattr(torch, DTYPE))
            for suffix, made in quantize(rows, matrix.form) if len(rows) else ():
                if suffix in matrix.buffers:
                    matrix.buffers[suffix].copy_(made)

    def _forms(self, model: nn.Module, layout: RankLayout) -> dict[str, Format]:
        """Return formats of linear layers by name. Raises ConfigError if a rank cannot quantise one."""
        buffers = {
            unwrapped(f"{path}.weight")
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        linears = {segment.tensor for segment in layout.segments if unwrapped(segment.buffer) in buffers}
        found = {}
        for meta in layout.tensors:
            form = self._quantization.of(meta.name) if meta.name in linears else None
            if form is None:
                continue
            if form.rule in (*MICROSCALING, *NEAREST) or form.block == (0, 0) or not form.symmetric:
                remedy = "quantise on the engine: leave quantization out"
                raise ConfigError(f"{_FIELD} of {meta.name}", str(form), remedy)
            found[meta.name] = form
        return found

    def _cut(
        self,
        segment: Segment,
        meta: TensorMeta,
        form: Format,
        stored: Mapping[str, tuple[TensorMeta, ...]],
        device: torch.device,
    ) -> list[Segment]:
        """Return the segments of a rank's quantised rows. Raises ConfigError if the rows cut a block."""
        first, end, rows = segment.box.offset[0], segment.box.end[0], meta.shape[0]
        block = form.block[0]
        if segment.box.extent[1] != meta.shape[1] or first % block or (end % block and end != rows):
            remedy = f"a rank has to hold whole blocks of {form}; leave quantization out, or cut otherwise"
            raise ConfigError(f"{_FIELD} of {meta.name}", f"its part {segment.box}", remedy)
        buffers, segments = {}, []
        for each in stored[meta.name]:
            suffix = each.name[len(meta.name.removesuffix("weight")) :]
            scale = block if suffix == form.scale_suffix else 1
            box = Box.whole(each.shape)
            if suffix != "weight_shape":
                held = (-(-end // scale) - first // scale, *each.shape[1:])
                box = Box((first // scale, *[0] * (len(each.shape) - 1)), held)
            buffer = self._buffer(each, box, device)
            if suffix == "weight_shape":
                buffer.copy_(torch.tensor(meta.shape))
            else:
                buffers[suffix] = buffer
            segments.append(Segment(each.name, box, _buffer_name(each), 0, box.strides(each.itemsize)))
        self._matrices[segment.buffer] = _Matrix(form, buffers)
        return segments

    def _buffer(self, meta: TensorMeta, box: Box, device: torch.device) -> torch.Tensor:
        """Return memory for this rank's part of a stored tensor. The memory does not move."""
        name, dtype = _buffer_name(meta), getattr(torch, meta.dtype)
        held = self._buffers.get(name)
        if held is None or held.shape != box.extent or held.device != device:
            held = self._buffers[name] = torch.empty(box.extent, dtype=dtype, device=device)
        return held


def _buffer_name(meta: TensorMeta) -> str:
    """Return a name that no tensor of a model has."""
    return f"{meta.name} as it is stored"
