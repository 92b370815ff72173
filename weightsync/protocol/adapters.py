"""The driver's description of a LoRA adapter for trainers and engines."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from weightsync.plan import TensorMeta

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


def is_of_expert(name: str) -> bool:
    """Return True if a tensor of an adapter is one expert's, by its name in a checkpoint."""
    return bool(_OF_EXPERT.search(name))


@dataclass(frozen=True)
class AdapterSpec:
    """One LoRA adapter, without the bytes.

    Attributes:
        name: the adapter's name in engines and requests.
        packed: the adapter's tensors. Every call for an adapter carries the spec, and only pickles these
            bytes.
        shares_a: whether ``gate_proj`` and ``up_proj`` of an expert have the same A.
    """

    name: str
    packed: bytes
    shares_a: bool = False

    @classmethod
    def of(cls, name: str, tensors: Sequence[TensorMeta], shares_a: bool = False) -> AdapterSpec:
        """Make the spec of these `tensors`."""
        rows = [(meta.name, meta.dtype, meta.shape) for meta in tensors]
        return cls(name, zlib.compress(json.dumps(rows).encode(), 1), shares_a)

    @cached_property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """A and B of each adapted module of the base model, in a checkpoint's names.

        ``<module>.lora_A.weight`` has the shape (rank, inputs), ``<module>.lora_B.weight`` (outputs, rank).
        Every expert has its own modules, such as ``….mlp.experts.0.gate_proj``, also if the trainer stacks
        experts.
        """
        rows = json.loads(zlib.decompress(self.packed))
        return tuple(TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in rows)

    @property
    def first_of_experts(self) -> str:
        """The name of the first tensor that is of an expert, "" if none is."""
        return next((meta.name for meta in self.tensors if is_of_expert(meta.name)), "")

    def __getstate__(self) -> dict[str, object]:
        return {"name": self.name, "packed": self.packed, "shares_a": self.shares_a}

    @property
    def rank(self) -> int:
        """The largest rank of the adapter's modules."""
        return max(meta.shape[0] for meta in self.tensors if meta.name.endswith(LORA_A))
