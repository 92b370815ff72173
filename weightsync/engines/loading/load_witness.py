"""A pattern that fills parameters before a load: a tensor that still has it was not loaded.

It asks no loader. A float gets a NaN that no arithmetic makes. Integers may have any value, so they count
only if all of a tensor has the pattern.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_BITS = {
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7EA5),
    torch.float32: (torch.int32, 0x7FE5A5A5),
}
_BYTE = 0xFF  # a NaN in FP8, and as a scale of MXFP4


class LoadWitness:
    """Fills tensors with the pattern."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = frozenset(tensors)
        for each in tensors.values():
            fill_pattern(each)

    def left(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors that the witness filled and the load did not.

        Args:
            tensors: the live tensors, by name.
        """
        return [name for name, each in tensors.items() if name in self._names and has_pattern(each)]


@torch.no_grad()
def fill_pattern(tensor: torch.Tensor) -> None:
    """Fill a tensor with the pattern."""
    if tensor.dtype in _BITS:
        dtype, bits = _BITS[tensor.dtype]
        tensor.detach().view(dtype).fill_(bits)
    elif tensor.element_size() == 1 and tensor.dtype is not torch.bool:
        tensor.detach().view(torch.uint8).fill_(_BYTE)


@torch.no_grad()
def has_pattern(tensor: torch.Tensor) -> bool:
    """Return True if a float of a tensor has the pattern, or all of its bytes."""
    if not tensor.numel():
        return False
    if tensor.dtype in _BITS:
        dtype, bits = _BITS[tensor.dtype]
        return bool((tensor.detach().view(dtype) == bits).any())
    if tensor.element_size() == 1 and tensor.dtype is not torch.bool:
        return bool((tensor.detach().view(torch.uint8) == _BYTE).all())
    return False
