"""Experts that a model stacks in one tensor, one by one as checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


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
    base = name.removesuffix(_GATE_UP).removesuffix(_DOWN)
    if base == name or not _is_stack(shapes.get(base + _GATE_UP, ()), shapes.get(base + _DOWN, ())):
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        prefix = f"{base}.experts.{number}"
        if name.endswith(_DOWN):
            yield f"{prefix}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up


def _is_stack(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether shapes are those of a stack. Transposed stacks are left to the models' own loaders."""
    return len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])
