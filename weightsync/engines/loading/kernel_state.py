"""Weights that kernels keep in objects beside a model's modules, such as the scales of experts.

vLLM's experts read scales through a configuration in the quantisation method. A reload makes a new
configuration, of tensors that it then copies into the live parameters. From then on the configuration refers
to memory that no later update writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

_HOLDERS = "quant_method", "scheme"
"""Attributes of modules with the objects that kernels need."""


class KernelState:
    """The attributes of all quantisation methods of a model, as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = {id(each): each for _, _, each in _holders(model)}
        self._held = [(each, dict(vars(each))) for each in found.values() if hasattr(each, "__dict__")]

    @classmethod
    def of_references(cls, model: torch.nn.Module) -> KernelState | None:
        """Return the state if all weights in it are live parameters. None if kernels made others of them."""
        return None if next(tensors_beside(model), None) else cls(model)

    def put_back(self) -> None:
        """Give the methods these attributes again, in place of those that a reload gave them."""
        for holder, attributes in self._held:
            vars(holder).clear()
            vars(holder).update(attributes)


class VolatileBuffers:
    """Which buffers of a model's modules are not persistent, as it is now.

    vLLM 0.24 registers all of them as persistent after a reload. Persistent ones count as weights.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = (module for module in model.modules() if module._non_persistent_buffers_set)
        self._held = [(module, set(module._non_persistent_buffers_set)) for module in modules]

    def put_back(self) -> None:
        """Have those that are still there be volatile again."""
        for module, names in self._held:
            module._non_persistent_buffers_set.update(names & module._buffers.keys())


def tensors_beside(model: torch.nn.Module) -> Iterator[str]:
    """Yield the paths of tensors that kernels hold, and that may be made of weights without being live.

    Live are the parameters and buffers of `model`, and views of them.
    """
    return (f"{path}.{where}" for path, where in _beside(model))


def modules_beside(model: torch.nn.Module) -> set[str]:
    """Return the paths of modules whose kernels hold such tensors."""
    return {path for path, _ in _beside(model)}


def _beside(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    tensors = (*model.parameters(), *model.buffers())
    live = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}
    seen = {id(module) for module in model.modules()}
    for path, name, holder in _holders(model):
        for where, tensor in _tensors(holder, seen):
            if tensor.untyped_storage().data_ptr() not in live:
                yield path, f"{name}{where}"


def _holders(model: torch.nn.Module) -> Iterator[tuple[str, str, Any]]:
    for path, module in model.named_modules():
        for name in _HOLDERS:
            if (holder := getattr(module, name, None)) is not None:
                yield path, name, holder


def _tensors(holder: object, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point and 8-bit tensors in an object, by path. Objects in `seen` are left out."""
    left: list[tuple[str, object]] = [("", holder)]
    while left:
        where, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            may_be_weight = value.is_floating_point() or value.element_size() == 1
            if may_be_weight and value.numel() and not value.is_meta:
                yield where, value
        elif not isinstance(value, type | ModuleType):
            left += [(f"{where}.{name}", each) for name, each in _parts(value)]


def _parts(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(value)
    slots = getattr(type(value), "__slots__", ())
    named = [slots] if isinstance(slots, str) else slots
    held = {name: getattr(value, name) for name in named if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **held}.items()
