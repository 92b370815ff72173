"""PEFT's adapters of experts that a model stacks in one parameter, one by one as checkpoints name them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.errors import ConfigError
from weightsync.plan import Box, Segment, TensorMeta
from weightsync.protocol.adapters import LORA_A

_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The projections in each of the parameters in which transformers stacks experts."""
_OUTER = ".base_layer"


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A parameter with the weights of all experts, [experts, outputs, inputs], that PEFT adapts.

    A has the rows of one expert after another, [experts * rank, inputs]. B begins with the first column of
    each expert, [outputs, rank * experts]. If the parameter stacks two projections, both use the same A, and
    each projection has rows of B.

    Attributes:
        path: the experts' name in a checkpoint, such as ``model.layers.0.mlp.experts``.
        parameter: the parameter's name.
        count: the number of experts.
    """

    path: str
    parameter: str
    count: int

    @classmethod
    def of(cls, path: str, module: Any) -> StackedExperts | None:  # noqa: ANN401 - PEFT's
        """Return the stacked experts that one of PEFT's modules adapts, or None.

        `path` is the module's name in PEFT's model.

        Raises ConfigError for other parameters than those of experts, and for transposed ones.
        """
        parameter = getattr(module, "parameter_name", None)
        if parameter is None:
            return None
        while path.endswith(_OUTER):  # parameters of one module are wrapped one around the other
            path = path.removesuffix(_OUTER)
        name = f"{path}.{parameter}"
        if parameter not in _PROJECTIONS or len(module.get_param().shape) != 3:
            known = " and ".join(_PROJECTIONS)
            raise ConfigError("target_parameters", name, f"leave it out: {known} of stacked experts are read")
        # If it is false, PEFT mistakes the inputs for the outputs.
        if not getattr(module, "_did_swap_in_out_features", False):
            remedy = "leave it out: its experts are read as [experts, outputs, inputs], by PEFT 0.19 or newer"
            raise ConfigError("target_parameters", name, remedy)
        return cls(path, parameter, module.num_experts)

    @property
    def name(self) -> str:
        """The parameter's name in a checkpoint of the model."""
        return f"{self.path}.{self.parameter}"

    def metas(self, whole: TensorMeta, suffix: str) -> Iterator[TensorMeta]:
        """Yield each expert's part of A or B, which is `whole`."""
        rows, columns = whole.shape
        projections = _PROJECTIONS[self.parameter]
        if suffix == LORA_A:
            shape = rows // self.count, columns
        else:
            shape = rows // len(projections), columns // self.count
        for expert in range(self.count):
            for projection in projections:
                yield replace(whole, name=self._name_of(expert, projection, suffix), shape=shape)

    def by_expert(self, local: torch.Tensor, suffix: str) -> torch.Tensor:
        """Return a view of a rank's rows of A or B, one expert after another."""
        if suffix == LORA_A:
            return local
        rows, columns = local.shape
        return local.view(rows, columns // self.count, self.count).permute(2, 0, 1)

    def segments(self, whole: TensorMeta, held: Segment, suffix: str) -> Iterator[Segment]:
        """Yield the segments of a rank's copy of `by_expert`, which has no gaps.

        `held` has the rank's box of `whole`. Raises ConfigError if a box of B only has some of the columns.
        """
        (top, left), (rows, columns) = held.box.offset, held.box.extent
        projections, is_a = _PROJECTIONS[self.parameter], suffix == LORA_A
        if not is_a and columns != whole.shape[1]:
            remedy = f"shard {whole.name} by rows: its columns belong to experts in turns"
            raise ConfigError("self.model", f"columns {left} to {left + columns}", remedy)
        size = whole.shape[0] // (self.count if is_a else len(projections))
        width = columns if is_a else columns // self.count
        step = width * whole.itemsize
        for expert in range(self.count):
            for number, projection in enumerate(projections):
                start = (expert if is_a else number) * size
                first, end = max(start, top), min(start + size, top + rows)
                if first < end:
                    yield Segment(
                        self._name_of(expert, projection, suffix),
                        Box((first - start, left), (end - first, width)),
                        held.buffer,
                        (first - top + (0 if is_a else expert * rows)) * step,
                        (step, whole.itemsize),
                    )

    def _name_of(self, expert: int, projection: str, suffix: str) -> str:
        return f"{self.path}.{expert}.{projection}{suffix}"
