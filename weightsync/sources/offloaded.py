"""A trainer rank's tensors while their device memory is released for an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.memory.offload import Offload

__all__ = ["Offloaded", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of a tensor, with its data, which may have the dtype that travels."""

    index: tuple[slice, ...]
    data: torch.Tensor


class Offloaded:
    """Offloaded tensors. The send buffer restores those that it has completely, host copies the others."""

    def __init__(self, live: Mapping[str, torch.Tensor], stored: Mapping[str, Sequence[Stored]]) -> None:
        """Release the memory of `live`. `stored` has the parts of each tensor in the send buffer."""
        self._live = live
        num_users = Counter(each.untyped_storage()._cdata for each in live.values())
        self._stored = {
            name: parts
            for name, parts in stored.items()
            if num_users[live[name].untyped_storage()._cdata] == 1 and _is_whole(live[name], parts)
        }
        others = [tensor for name, tensor in live.items() if name not in self._stored]
        self._memory = Offload(live.values(), keep=others)

    def leave_send_buffer(self) -> None:
        """Copy tensors out of the send buffer, which is about to be closed."""
        for name, parts in self._stored.items():
            copy = torch.empty(self._live[name].shape, dtype=self._live[name].dtype)
            whole = tuple(slice(0, size) for size in copy.shape)
            _fill(copy, parts)
            self._stored[name] = [Stored(whole, copy.view(-1))]

    def on_host(self) -> dict[str, torch.Tensor]:
        """Return all tensors on the host, after `leave_send_buffer`."""
        kept = {n: self._memory.on_host(t) for n, t in self._live.items() if n not in self._stored}
        return kept | {n: part.data.view(self._live[n].shape) for n, (part,) in self._stored.items()}

    def undo(self) -> None:
        """Allocate the memory again and restore its contents."""
        self._memory.undo()
        for name, parts in self._stored.items():
            _fill(self._live[name], parts)


def _is_whole(tensor: torch.Tensor, parts: Sequence[Stored]) -> bool:
    same = all(part.data.dtype == tensor.dtype for part in parts)
    return same and sum(part.data.numel() for part in parts) == tensor.numel()


@torch.no_grad()
def _fill(tensor: torch.Tensor, parts: Sequence[Stored]) -> None:
    for part in parts:
        target = tensor[part.index]
        target.copy_(part.data.view(target.shape))
