"""Stands in for SGLang's kernels, which need CUDA. On a CPU without AMX, SGLang computes by torch alone.

Also for memory that CUDA pins, for which SGLang's adapters ask on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch


def __getattr__(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()


def _pageable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return make(*args, **more)

    return made


if not torch.cuda.is_available():
    for each in ("tensor", "empty", "zeros"):
        setattr(torch, each, _pageable(getattr(torch, each)))
    torch.Tensor.pin_memory = lambda self, *_: self
