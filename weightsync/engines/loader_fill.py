"""Counts how much of a model its loader has filled, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class ToFill:
    """A tensor that a loader fills.

    Attributes:
        tensor: the tensor when the loader runs; may be on the meta device.
        numel: how many of its elements a checkpoint has; the others are padding.
        needed: whether an update without it is incomplete even if no tensor of this name came.
    """

    tensor: torch.Tensor
    numel: int
    needed: bool = True


class FillCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts, while entered, which elements of the tensors are written. A view counts once."""

    def __init__(self, tensors: Mapping[str, ToFill]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = dict(tensors)
        # Keep the tensors alive, so that no other storage gets the number of one of theirs.
        self._names = {_storage(each.tensor): name for name, each in tensors.items()}
        self._filled = dict.fromkeys(tensors, 0)
        self._seen: set[tuple[object, ...]] = set()

    def missing(self, handed: Iterable[str] = ()) -> list[str]:
        """Return the names of tensors that are not full, with counts if partly written.

        Args:
            handed: names of the checkpoint's tensors that came; these are always needed.
        """
        came = set(handed)
        return [
            name if not filled else f"{name} ({filled} of {self._tensors[name].numel} elements came)"
            for name, filled in self._filled.items()
            if filled < self._tensors[name].numel and (self._tensors[name].needed or name in came)
        ]

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an OpOverload, and what it takes
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        outcome = func(*args, **(kwargs or {}))
        # Operators that write in place take their target first: copy_, fill_, zero_, index_put_.
        declared = func._schema.arguments
        if args and declared[0].alias_info is not None and declared[0].alias_info.is_write:
            self._note(args[0])
        return outcome

    def _note(self, view: object) -> None:
        if not isinstance(view, torch.Tensor) or view.layout is not torch.strided:
            return
        name = self._names.get(_storage(view))
        key = (name or "", view.storage_offset(), view.shape, view.stride())
        if name and key not in self._seen:
            self._seen.add(key)
            self._filled[name] += view.numel()


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that all views of a tensor share. The address is 0 on the meta device."""
    number: int = tensor.untyped_storage()._cdata
    return number
