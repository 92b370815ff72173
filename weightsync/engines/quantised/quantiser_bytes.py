"""A random matrix for an engine's quantiser, and the comparison of the bytes that it makes."""

from __future__ import annotations

import torch


def random_matrix(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a random matrix, with rows of different sizes."""
    draw = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(rows, columns, generator=draw, device=device, dtype=dtype)
    return matrix.mul_(torch.logspace(-4, 1, rows, device=device).to(dtype).unsqueeze(1))


def are_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return True if both have the same dtype, shape and bits."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (found, wanted)))
