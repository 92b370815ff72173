"""Experts that a model stacks in one tensor, one by one as checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weightsync.plan.layout.experts import expert_parts


def as_loaded(
    name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor, or views of its experts, under the names that they have in checkpoints.

    Transformers stacks ``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj`` [E, H, I]. Loaders
    of SGLang, and of vLLM before 0.32, silently skip these names; all take ``experts.0.gate_proj.weight``
    [I, H] and its like. Stacks of other shapes are not split.

    Args:
        shapes: the shapes of all tensors of the checkpoint, by name.
    """
    for part, box in expert_parts(name, tensor.shape, shapes):
        yield part, tensor if part == name else tensor[box.slices()][0]
