"""Counts the elements that a model's loader has filled, per tensor, and leads each write to memory.

While vLLM reloads a module, the module's parameters are on the meta device. vLLM keeps each tensor that goes
through a parameter's ``weight_loader``, and loads it again once the module has memory. Other writes, such as
``param.data.copy_``, would reach no memory. They count only if they are led to memory that becomes live.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.engines.loading.load_witness import fill_pattern

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ToFill:
    """A tensor that a loader fills.

    Attributes:
        tensor: the tensor when the loader runs; may be on the meta device.
        numel: the number of elements in a checkpoint; the other elements are padding.
        needed: an update without this tensor is incomplete, even if no tensor of this name arrived.
    """

    tensor: torch.Tensor
    numel: int
    needed: bool = True


class FillCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts, while entered, which elements of the tensors are written. A view counts once.

    New memory of floats is filled with the pattern of `load_witness`.
    """

    def __init__(
        self,
        tensors: Mapping[str, ToFill],
        is_kept: Callable[[str], bool] = lambda _: False,
        memory_of: Callable[[str], torch.Tensor | None] = lambda _: None,
        unwritten: Collection[int] = (),
    ) -> None:
        """
        Args:
            is_kept: returns True if the engine repeats the write that is made now to this meta tensor.
            memory_of: returns memory that becomes live in place of this meta tensor. None if there is none.
            unwritten: the `storage_number` of memory in which writes are counted, and not made.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = dict(tensors)
        # Keep the tensors alive, so that no other storage gets the number of one of theirs.
        self._names = {storage_number(each.tensor): name for name, each in tensors.items()}
        self._is_kept, self._memory_of, self._unwritten = is_kept, memory_of, unwritten
        self._memories: dict[str, torch.Tensor] = {}
        self._filled = dict.fromkeys(tensors, 0)
        self._lost: set[str] = set()
        self._direct: dict[str, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._seen: set[tuple[object, ...]] = set()

    @property
    def writes_directly(self) -> bool:
        """Return True if a write was led to memory, as the engine would have lost it."""
        return bool(self._memories)

    def take_direct(self) -> dict[str, int]:
        """Return how many elements were led to memory since the last call, by the tensor's name."""
        direct, self._direct = self._direct, {}
        return direct

    def dtype_of(self, source: torch.Tensor) -> torch.dtype:
        """Return the dtype of the first copy of `source`, or of `source` if there was no copy."""
        return self._dtypes.get(storage_number(source), source.dtype)

    def missing(self, handed: Iterable[str] = ()) -> list[str]:
        """Return the names of tensors that are not full, with counts if partly written.

        Args:
            handed: names of the checkpoint's tensors that came; these are always needed.
        """
        came = set(handed)
        return [
            self._state(name)
            for name, filled in self._filled.items()
            if name in self._lost
            or (filled < self._tensors[name].numel and (self._tensors[name].needed or name in came))
        ]

    def _state(self, name: str) -> str:
        if name in self._lost:
            return f"{name} (written where it reaches no memory)"
        filled = self._filled[name]
        return f"{name} ({filled} of {self._tensors[name].numel} elements came)" if filled else name

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an OpOverload, and what it takes
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        # Operators that write in place take their target first: copy_, fill_, zero_, index_put_.
        declared = func._schema.arguments
        if args and declared[0].alias_info is not None and declared[0].alias_info.is_write:
            return self._write(func, args, kwargs or {})
        outcome = func(*args, **(kwargs or {}))
        if func is _ATEN.empty_strided.default and not outcome.is_meta:
            fill_pattern(outcome)
        return outcome

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        target = args[0]
        number = storage_number(target)
        name = self._names.get(number, "")
        is_direct = name in self._memories and not target.is_meta
        if name and target.is_meta and not self._is_kept(name):
            is_direct = True
            if (memory := self._memory_of(name)) is None:
                self._lost.add(name)
            else:
                self._memories[name] = memory
                self._names[storage_number(memory)] = name
                args = (_as_view(memory, target), *args[1:])
        outcome = target if number in self._unwritten else func(*args, **kwargs)
        if name:
            source = args[1] if func is _ATEN.copy_.default else target
            self._dtypes.setdefault(storage_number(source), target.dtype)
            numel = self._note(name, target, source)
            if is_direct:
                self._direct[name] = self._direct.get(name, 0) + numel
        return target if is_direct else outcome

    def _note(self, name: str, view: torch.Tensor, source: torch.Tensor) -> int:
        """Count a write. Returns its number of elements, without elements that a copy repeats."""
        key = (name, view.storage_offset(), view.shape, view.stride())
        if key in self._seen:
            return 0
        self._seen.add(key)
        numel = min(view.numel(), source.numel())
        self._filled[name] += numel
        return numel


def storage_number(tensor: object) -> int:
    """Return a number that all views of a tensor share. The address is 0 on the meta device."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return 0
    number: int = tensor.untyped_storage()._cdata
    return number


def _as_view(memory: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the part of `memory` that `view` is of a meta tensor of the same form."""
    part = torch.empty(0, dtype=view.dtype, device=memory.device)
    return part.set_(memory.untyped_storage(), view.storage_offset(), view.shape, view.stride())
