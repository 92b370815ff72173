"""A draft model in an engine's rank, with the modules and tensors that the target does not share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from weightsync.config import Treatment


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model in one rank of an engine.

    Attributes:
        method: the engine's name of the way to speculate.
        path: where the draft's checkpoint is.
        model: the module.
    """

    method: str
    path: str
    model: torch.nn.Module

    def packed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield modules whose weights kernels have packed, by name, with the weights that these compute with.

        Engines that can tell override it.
        """
        yield from ()


@runtime_checkable
class HasDraft(Protocol):
    """A `Host` that may speculate with a draft model."""

    def draft(self, treatment: Treatment | None) -> DraftModel | None:
        """Return this rank's draft, to be treated so; None without one. A trained one is a `TrainableDraft`.

        Raises ConfigError if that is not possible: a frozen draft needs real weights.
        """


def own_tensors(draft: torch.nn.Module, target: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a draft's parameters and persistent buffers by name, without memory that is the target's.

    Scales of caches are left out: no checkpoint has to have them.
    """
    theirs = {each.untyped_storage().data_ptr() for each in _tensors(target) if each.numel()}
    held: dict[str, torch.Tensor] = {}
    for path, module in own_modules(draft, target):
        if hasattr(module, "kv_cache_dtype"):
            continue
        saved = {
            name: each
            for name, each in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in {**dict(module.named_parameters(recurse=False)), **saved}.items():
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in theirs:
                held[f"{path}.{name}" if path else name] = tensor
    return held


def shares_weights(draft: torch.nn.Module, target: torch.nn.Module) -> bool:
    """Return True if a draft has parameters of the target. Shared modules without any do not count."""
    theirs = {each.untyped_storage().data_ptr() for each in target.parameters() if each.numel()}
    own = {id(module) for _, module in own_modules(draft, target)}
    return any(
        id(module) not in own or each.untyped_storage().data_ptr() in theirs
        for module in draft.modules()
        for each in module.parameters(recurse=False)
    )


def own_modules(draft: torch.nn.Module, target: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a draft's modules by name, without those that are the target's."""
    theirs = {id(module) for module in target.modules()}
    return ((path, module) for path, module in draft.named_modules() if id(module) not in theirs)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
