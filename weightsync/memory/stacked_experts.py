"""Views of stacked experts, one by one as in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weightsync.plan.layout.experts import expert_parts


def as_loaded(
    name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor, or views of the tensor's experts, under the names in checkpoints.

    Transformers stacks ``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj`` [E, H, I]. Loaders
    of SGLang, and of vLLM before 0.32, silently skip these names; all loaders know
    ``experts.0.gate_proj.weight`` [I, H] and similar names. Stacks of other shapes are not split.

    Args:
        shapes: the shapes of all tensors of the checkpoint, by name.
    """
    for part, box in expert_parts(name, tensor.shape, shapes):
        yield part, tensor if part == name else tensor[box.slices()][0]
