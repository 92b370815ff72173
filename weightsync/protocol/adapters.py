"""What the driver tells a trainer and an engine of a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.plan import TensorMeta

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One LoRA adapter, without its bytes.

    Attributes:
        name: what engines and requests call it.
        tensors: ``<module>.lora_A.weight``, of shape (rank, inputs), and ``<module>.lora_B.weight``, of shape
            (outputs, rank), for each module of the base model that it adapts, in a checkpoint's names.
    """

    name: str
    tensors: tuple[TensorMeta, ...]

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(meta.shape[0] for meta in self.tensors if meta.name.endswith(LORA_A))
