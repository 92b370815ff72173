"""Stands in for torchvision, which SGLang imports for images, and which has no build for this torch."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

__version__ = "0"
for module in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{module}"] = MagicMock()


def __getattr__(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
