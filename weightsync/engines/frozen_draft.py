"""A draft model that updates leave as it is: its bytes are compared after each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from weightsync.engines.kernel_state import modules_beside
from weightsync.engines.live_digest import TensorDigests, in_order, kind_of
from weightsync.memory.digests import tensor_digests
from weightsync.plan.draft import Draft


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model in one rank of an engine.

    Attributes:
        method: the engine's name of the way to speculate.
        path: where the draft's checkpoint is.
        model: the module, whose weights are loaded.
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

    def draft(self) -> DraftModel | None:
        """Return this rank's draft; None without one. Raises ConfigError if its weights are not real."""


class FrozenDraft:
    """The bytes of a draft's own tensors, as they were when this was made."""

    def __init__(self, draft: DraftModel, target: torch.nn.Module, device: torch.device) -> None:
        self._draft, self._target, self._device = draft, target, device
        self._digests = TensorDigests(device)
        self._began = self._take()

    def describe(self) -> Draft:
        """Return what the driver compares with other engines' drafts."""
        held = own_tensors(self._draft.model, self._target)
        listed = hashlib.sha256(repr(sorted(self._began.items())).encode())
        packed = {name: each.numel() * each.element_size() for name, each in self._packed()}
        return Draft(
            self._draft.method,
            self._draft.path,
            len(held) + len(packed),
            sum(each.numel() * each.element_size() for each in held.values()) + sum(packed.values()),
            len(_hidden(self._draft.model, self._target) - packed.keys()),
            kind_of(held.items(), self._device),
            listed.hexdigest(),
        )

    def changed(self) -> list[str]:
        """Return the names of tensors whose bytes are not what they were.

        A tensor that the draft no longer shares with the target is one of them.
        """
        now = self._take()
        return sorted(
            name for name in now.keys() | self._began.keys() if now.get(name) != self._began.get(name)
        )

    def _take(self) -> Mapping[str, int]:
        held = own_tensors(self._draft.model, self._target)
        digests = self._digests.of([in_order(each.detach()) for each in held.values()])
        taken = dict(zip(held, digests.tolist(), strict=True))
        for name, weight in self._packed():  # one at a time, since each is a copy
            taken[f"{name}, as it is packed"] = int(tensor_digests([weight])[0])
        return taken

    def _packed(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = {path for path, _ in _own_modules(self._draft.model, self._target)}
        return ((name, weight) for name, weight in self._draft.packed() if name in own)


def own_tensors(draft: torch.nn.Module, target: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a draft's parameters and persistent buffers by name, without memory that is the target's.

    Scales of caches are left out: no checkpoint has to have them.
    """
    theirs = {each.untyped_storage().data_ptr() for each in _tensors(target) if each.numel()}
    held: dict[str, torch.Tensor] = {}
    for path, module in _own_modules(draft, target):
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
    """Whether a draft has parameters of the target. Shared modules without any do not count."""
    theirs = {each.untyped_storage().data_ptr() for each in target.parameters() if each.numel()}
    own = {id(module) for _, module in _own_modules(draft, target)}
    return any(
        id(module) not in own or each.untyped_storage().data_ptr() in theirs
        for module in draft.modules()
        for each in module.parameters(recurse=False)
    )


def _hidden(draft: torch.nn.Module, target: torch.nn.Module) -> set[str]:
    """Return the names of modules with weights that kernels hold in other memory than their parameters."""
    own = dict(_own_modules(draft, target))
    empty = {path for path, each in own.items() if any(not p.numel() for p in each.parameters(recurse=False))}
    return empty | (modules_beside(draft) & own.keys())


def _own_modules(draft: torch.nn.Module, target: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    theirs = {id(module) for module in target.modules()}
    return ((path, module) for path, module in draft.named_modules() if id(module) not in theirs)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
