"""Engine adapters by name, each imported on use. README.md explains how to add one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from weightsync.channel.sink import Sink
from weightsync.engines.base import (
    CachesPrefixes,
    CountsDrafts,
    DraftCounts,
    Engine,
    ExportsAhead,
    ExportsMemory,
    Generates,
    HasComponents,
    HasRankHosts,
    HasRankProcesses,
    MovesExperts,
    Rollout,
    ServesAdapters,
    Sleeps,
)
from weightsync.errors import ConfigError, nearest

__all__ = [
    "ENGINES",
    "CachesPrefixes",
    "CountsDrafts",
    "DraftCounts",
    "Engine",
    "ExportsAhead",
    "ExportsMemory",
    "Generates",
    "HasComponents",
    "HasRankHosts",
    "HasRankProcesses",
    "MovesExperts",
    "Rollout",
    "ServesAdapters",
    "Sink",
    "Sleeps",
    "choose_engine",
    "make_engine",
]

# kind -> (package it needs, "module:Class")
ENGINES = {
    "vllm": ("vllm", "weightsync.engines.vllm.adapter:VllmEngine"),
    "sglang": ("sglang", "weightsync.engines.sglang.adapter:SglangEngine"),
    "torch": ("transformers", "weightsync.engines.torch.torch_module:TorchEngine"),
}

_ON_GPUS = ("sglang",)
"""Kinds that start on GPUs only. Without a GPU, ``auto`` skips them."""


def choose_engine(kind: str, *, field: str = "kind") -> tuple[str, str]:
    """Resolve ``auto``, or check that a named kind is installed. Returns (kind, why).

    A kind with a colon is the path of a class: ``package.module:Class``.

    Raises ConfigError that names `field`.
    """
    if ":" in kind:
        try:
            found, error = callable(resolve_name(kind)), "it is no class"
        except (ImportError, AttributeError, ValueError) as failure:
            found, error = False, str(failure)
        if not found:
            raise ConfigError(
                field, kind, f"give package.module:Class, which this process can import: {error}"
            )
        return kind, "asked for by its class"
    if kind == "auto":
        for name, (package, _) in ENGINES.items():
            if importlib.util.find_spec(package) and (name not in _ON_GPUS or _has_gpu()):
                return name, f"auto: {package} is installed"
        packages = ", ".join(package for package, _ in ENGINES.values())
        raise ConfigError(field, kind, f"install one of {packages}")
    if kind not in ENGINES:
        raise ConfigError(field, kind, nearest(kind, (*ENGINES, "auto")))
    package = ENGINES[kind][0]
    if not importlib.util.find_spec(package):
        raise ConfigError(field, kind, f"{package} is not installed: install it, or use kind: auto")
    return kind, "asked for by name"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def make_engine(kind: str, model_path: str, name: str, options: Mapping[str, Any]) -> Generates:
    """Import the adapter of a resolved kind and start an engine.

    Raises ConfigError for a folder that does not exist. A path that may name a model on a hub is not checked.
    """
    if (model_path.count("/") > 1 or os.path.isabs(model_path)) and not os.path.isdir(model_path):
        raise ConfigError("model_path", model_path, "there is no such folder on this host")
    path = kind if ":" in kind else ENGINES[kind][1]
    engine: Generates = resolve_name(path)(model_path, name, options)
    return engine
