"""Addresses of a module's tensors: plain ones, and DTensors of FSDP2 and tensor parallelism."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NUM_AT_ONCE = 512
_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return True if `tensor` is a DTensor.

    Does not import DTensor's module, which takes 0.7 s: without this module, there are no DTensors.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, detached: otherwise each version's copy would extend the graph.

    Equals ``to_local`` without gradients, which would call autograd for each tensor.
    """
    return attached_part(tensor).detach()


def attached_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part with autograd's graph, to read address, shape and strides."""
    return _local(tensor) if is_sharded(tensor) else tensor


class AddressGuard:
    """Addresses and layouts of a module's tensors, compared before each version.

    The guard reaches every parameter and persistent buffer through the modules, and keeps none alive. The
    comparison runs in C, some hundred modules at a time, so that they stay in the processor's cache.

    Attributes:
        strays: names of tensors that no module holds: a hook puts them into the ``state_dict``.
    """

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor], part: str = "") -> None:
        """`tensors` is the result of ``named_tensors(module)``.

        If a parameter has an attribute named `part`, this attribute has the memory, and `tensors` has the
        attribute in place of the parameter.
        """
        self._module = module
        self._place = {name: _place(tensor) for name, tensor in tensors.items()}
        modules = list(module.modules())
        self._parts = [
            _Modules(modules[at : at + _NUM_AT_ONCE], part) for at in range(0, len(modules), _NUM_AT_ONCE)
        ]
        known = {id(held) for part in self._parts for held in part.saved()}
        self.strays = frozenset(name for name, tensor in tensors.items() if id(tensor) not in known)

    def as_before(self, module: nn.Module) -> bool:
        """Return True if `module` is the same, with the same tensor names, layouts and addresses.

        Also False while FSDP has gathered tensors, until the next ``state_dict``. Always False if a hook adds
        tensors to the ``state_dict``, or a module defines ``__eq__``.
        """
        return (
            module is self._module and not self.strays and all(part.are_as_before() for part in self._parts)
        )

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors whose address, shape, strides or dtype changed."""
        return [name for name, tensor in tensors.items() if self._place.get(name) != _place(tensor)]


class _Modules:
    """Children, parameters and buffers of some modules, by name."""

    def __init__(self, modules: Sequence[nn.Module], part: str) -> None:
        homes = [home for each in modules for home in (each._parameters, each._buffers, each._modules)]
        self._empty = [home for home in homes if not home]
        self._parents = [each._modules for each in modules if each._modules]
        self._children = list(map(dict, self._parents))
        # Dictionaries are compared in C, by identity unless a module defines __eq__.
        children = chain.from_iterable(map(dict.values, self._parents))
        self._are_compared_by_identity = all(type(each).__eq__ is object.__eq__ for each in children)
        with_buffers = [each for each in modules if each._buffers]
        self._volatile = [each._non_persistent_buffers_set for each in with_buffers]
        self._volatile_before = [set(each) for each in self._volatile]
        unsent = {
            (id(each._buffers), key) for each in with_buffers for key in each._non_persistent_buffers_set
        }
        self._homes = [home for each in modules for home in (each._parameters, each._buffers) if home]
        self._num_entries = list(map(len, self._homes))
        slots = [(home, key) for home in self._homes for key in home]
        self._unsent = [(home, key) for home, key in slots if (id(home), key) in unsent]
        sent = [(home, key) for home, key in slots if (id(home), key) not in unsent]
        found = [home[key] for home, key in sent]
        self._absent = _Slots(compress(sent, (each is None for each in found)))
        sharded = list(map(is_sharded, found))
        parted = [bool(part) and hasattr(each, part) for each in found]
        plain = [
            each is not None and not any(others) for each, *others in zip(found, sharded, parted, strict=True)
        ]
        self._tensors = (
            _Tensors(compress(sent, plain)),
            _Shards(compress(sent, sharded)),
            _Parts(compress(sent, parted), part),
        )

    def saved(self) -> Iterator[torch.Tensor]:
        """Yield the modules' tensors in a ``state_dict``."""
        return chain.from_iterable(kind.saved() for kind in self._tensors)

    def are_as_before(self) -> bool:
        return (
            self._are_compared_by_identity
            and not any(self._empty)
            and self._parents == self._children
            # Old entries are looked up below. If their number is the same, no entry was added.
            and list(map(len, self._homes)) == self._num_entries
            and all(key in home for home, key in self._unsent)
            and self._volatile == self._volatile_before
            and all(tensors.are_as_before() for tensors in self._tensors)
            and all(map(is_, self._absent.found(), repeat(None)))
        )


class _Slots:
    """Some entries of dictionaries."""

    def __init__(self, slots: Iterable[tuple[dict[str, Any], str]]) -> None:
        self._homes: list[dict[str, Any]] = []
        self._keys: list[str] = []
        for home, key in slots:
            self._homes.append(home)
            self._keys.append(key)

    def found(self) -> list[Any]:
        return list(map(dict.get, self._homes, self._keys))


class _Tensors(_Slots):
    """Plain tensors."""

    def __init__(self, slots: Iterable[tuple[dict[str, Any], str]]) -> None:
        super().__init__(slots)
        held = self._locals(self.found())
        self._addresses = list(map(torch.Tensor.data_ptr, held))
        self._layouts = list(map(_layout, held))
        self._guards = _guards(held)

    def are_as_before(self) -> bool:
        return self._are_in_place(self.found())

    def _are_in_place(self, found: list[Any]) -> bool:
        try:
            held = self._locals(found)
            addresses = list(map(torch.Tensor.data_ptr, held))
            return addresses == self._addresses and self._are_laid_out_as_before(held)
        # Now another kind of tensor, no tensor, or a tensor without memory.
        except (TypeError, AttributeError, RuntimeError):
            return False

    def saved(self) -> list[Any]:
        return self.found()

    def _locals(self, found: list[Any]) -> list[Any]:
        return found

    def _are_laid_out_as_before(self, held: Sequence[torch.Tensor]) -> bool:
        if self._guards.check(*held):
            return True
        # Guards also fail after a change of requires_grad, or in inference mode.
        if list(map(_layout, held)) != self._layouts:
            return False
        self._guards = _guards(held)
        return True


class _Shards(_Tensors):
    """DTensors."""

    def __init__(self, slots: Iterable[tuple[dict[str, Any], str]]) -> None:
        super().__init__(slots)
        self._specs = list(map(_spec, self.found()))

    def _are_in_place(self, found: list[Any]) -> bool:
        return super()._are_in_place(found) and list(map(_spec, found)) == self._specs

    def _locals(self, found: list[Any]) -> list[Any]:
        return list(map(_local, found))


class _Parts(_Tensors):
    """Parameters with memory in an attribute."""

    def __init__(self, slots: Iterable[tuple[dict[str, Any], str]], part: str) -> None:
        self._part: Callable[[Any], torch.Tensor] = attrgetter(part or "data")
        super().__init__(slots)

    def saved(self) -> list[Any]:
        return self._locals(self.found())

    def _locals(self, found: list[Any]) -> list[Any]:
        return list(map(self._part, found))


_local: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
_spec: Callable[[Any], Any] = attrgetter("_spec")


def _guards(tensors: Sequence[torch.Tensor]) -> TensorGuards:
    """Return guards that check shapes, strides and dtypes in one call, as ``torch.compile`` does."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _place(tensor: torch.Tensor) -> _Place:
    held = attached_part(tensor)
    return held.data_ptr(), *_layout(held)
