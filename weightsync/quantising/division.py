"""Division that gives the same floats on CPUs and GPUs."""

from __future__ import annotations

import torch


def divided(tensor: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return `tensor` over a number, rounded correctly, in the tensor's dtype.

    For a number, PyTorch's GPU kernels multiply by the reciprocal. For a tensor on the device, they divide.
    """
    return tensor / torch.tensor(divisor, dtype=tensor.dtype, device=tensor.device)
