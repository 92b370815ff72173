"""Where a module's tensors lie: plain ones, and DTensors as FSDP2 and tensor parallelism leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.modules import named_tensors

__all__ = ["Places", "local_tensor", "local_tensors"]

_NUM_AT_ONCE = 128
_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it. Detached: a copy would otherwise grow a graph with each version."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds of each of `named_tensors`."""
    return {name: local_tensor(tensor) for name, tensor in named_tensors(module)[0].items()}


class Places:
    """What a module's tensors are and where they lie, to be compared before each version.

    It knows the way to every parameter and persistent buffer and keeps none of them alive. Comparing is
    left to C, some hundred tensors at a time, while a processor's cache still has them.

    Attributes:
        strays: names of tensors that no module holds: a hook puts them into the ``state_dict``.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors` are those of ``named_tensors(module)``."""
        self._module = module
        self._place = {name: _place(tensor) for name, tensor in tensors.items()}
        modules = list(module.modules())
        self._held = _Sizes(held for each in modules for held in (each._parameters, each._buffers))
        self._leaves = [each._modules for each in modules if not each._modules]
        self._parents = [each._modules for each in modules if each._modules]
        self._names = list(chain.from_iterable(self._parents))
        self._num_children = list(map(len, self._parents))
        self._children = list(chain.from_iterable(map(dict.values, self._parents)))
        with_buffers = [each for each in modules if each._buffers]
        self._volatile = [each._non_persistent_buffers_set for each in with_buffers]
        self._volatile_before = [set(each) for each in self._volatile]
        self._unsent = [(m._buffers, key) for m in with_buffers for key in m._non_persistent_buffers_set]
        slots = [
            (held, key)
            for each in modules
            for held in (each._parameters, each._buffers)
            for key in held
            if held is each._parameters or key not in each._non_persistent_buffers_set
        ]
        self._slots = [_Slots(slots[at : at + _NUM_AT_ONCE]) for at in range(0, len(slots), _NUM_AT_ONCE)]
        known = {id(home[key]) for home, key in slots}
        self.strays = frozenset(name for name, tensor in tensors.items() if id(tensor) not in known)

    def as_before(self, module: nn.Module) -> bool:
        """Whether `module` is the same one, and its tensors have the same names, layouts and memory.

        False also while FSDP has gathered tensors, which taking a ``state_dict`` undoes, and always
        where a hook puts tensors of its own into the ``state_dict``.
        """
        return (
            module is self._module
            and not self.strays
            and not any(self._leaves)
            and list(map(len, self._parents)) == self._num_children
            and list(chain.from_iterable(self._parents)) == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, self._parents)), self._children))
            # Tensors that there were are looked up; if there are as many, none was added.
            and self._held.are_as_before()
            and all(key in home for home, key in self._unsent)
            and self._volatile == self._volatile_before
            and all(slots.are_as_before() for slots in self._slots)
        )

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of tensors that are now in other memory, or laid out in other strides."""
        return [name for name, tensor in tensors.items() if self._place.get(name) != _place(tensor)]


class _Sizes:
    """How many entries dictionaries have."""

    def __init__(self, homes: Iterable[dict[str, Any]]) -> None:
        self._empty: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        for home in homes:
            (self._filled if home else self._empty).append(home)
        self._sizes = list(map(len, self._filled))

    def are_as_before(self) -> bool:
        return not any(self._empty) and list(map(len, self._filled)) == self._sizes


class _Slots:
    """Some entries of dictionaries: tensors, or None where a module has no such parameter."""

    def __init__(self, slots: Sequence[tuple[dict[str, Any], str]]) -> None:
        self._homes, self._keys = [home for home, _ in slots], [key for _, key in slots]
        found = [home[key] for home, key in slots]
        self._types = list(map(type, found))
        self._is_sharded = [isinstance(each, DTensor) for each in found]
        self._is_plain = [each is not None and not isinstance(each, DTensor) for each in found]
        self._are_plain = all(self._is_plain)
        self._specs = list(map(_spec, compress(found, self._is_sharded)))
        held = self._locals(found)
        self._addresses = list(map(torch.Tensor.data_ptr, held))
        self._sizes, self._dtypes = list(map(torch.Tensor.numel, held)), list(map(_dtype, held))
        self._are_contiguous = all(map(torch.Tensor.is_contiguous, held))
        self._strides = [] if self._are_contiguous else list(map(_strides, held))

    def are_as_before(self) -> bool:
        found = list(map(dict.get, self._homes, self._keys))
        if list(map(type, found)) != self._types:
            return False
        held = self._locals(found)
        return (
            list(map(torch.Tensor.data_ptr, held)) == self._addresses
            and list(map(torch.Tensor.numel, held)) == self._sizes
            and list(map(_dtype, held)) == self._dtypes
            and self._have_their_strides(held)
            and (self._are_plain or list(map(_spec, compress(found, self._is_sharded))) == self._specs)
        )

    def _have_their_strides(self, held: Sequence[torch.Tensor]) -> bool:
        # To ask for shapes takes three times as long. As many elements without gaps are the same bytes.
        if self._are_contiguous:
            return all(map(torch.Tensor.is_contiguous, held))
        return list(map(_strides, held)) == self._strides

    def _locals(self, found: Sequence[Any]) -> Sequence[Any]:
        if self._are_plain:
            return found
        return [*compress(found, self._is_plain), *map(_local, compress(found, self._is_sharded))]


_dtype: Callable[[Any], torch.dtype] = attrgetter("dtype")
_local: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
_spec: Callable[[Any], Any] = attrgetter("_spec")


def _strides(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def _place(tensor: torch.Tensor) -> _Place:
    held = local_tensor(tensor)
    return held.data_ptr(), held.shape, held.stride(), held.dtype
