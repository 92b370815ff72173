"""Stands in for SGLang's kernels, which need CUDA. On a CPU without AMX, SGLang computes by torch alone."""

from __future__ import annotations

from unittest.mock import MagicMock


def __getattr__(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
