"""The bytes that an engine's kernels read, as hashes that fit into a message."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from tests.contract.live_model import held

__all__ = ["Live", "all_hashes", "hashes"]

Live = list[Mapping[str, str]]
"""Each rank's live parameters, as SHA-256 of their bytes in order of their elements."""


def hashes(model: torch.nn.Module) -> Mapping[str, str]:
    """Hash each parameter of a rank's model."""
    return {name: _hash(parameter.detach()) for name, parameter in model.named_parameters()}


def all_hashes(model: torch.nn.Module) -> Mapping[str, str]:
    """Hash each parameter and buffer of a rank's model, and each tensor that a module keeps beside them."""
    return {name: _hash(each) for name, each in held(model).items()}


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
