"""A trainer rank's tensors while their device memory is released for an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.memory.offload import Offload
from weightsync.memory.tensors import segment_view
from weightsync.plan import Segment


@dataclass(frozen=True, slots=True)
class OffloadedPart:
    """A part of a segment, with its data, which may have the dtype that travels."""

    segment: Segment
    index: tuple[slice, ...]
    data: torch.Tensor


class Offloaded:
    """Offloaded tensors. The send buffer restores those that it has completely, host copies the others."""

    def __init__(
        self, live: Mapping[str, torch.Tensor], stored: Mapping[str, Sequence[OffloadedPart]]
    ) -> None:
        """Release the memory of `live`. `stored` has the parts of each tensor in the send buffer."""
        self._live = live
        self._copies: dict[str, torch.Tensor] = {}
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
            live = self._live[name]
            copy = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype)
            _fill(copy, parts)
            self._copies[name] = copy
        self._stored = {}

    def on_host(self) -> dict[str, torch.Tensor]:
        """Return all tensors on the host, after `leave_send_buffer`."""
        others = {n: t for n, t in self._live.items() if n not in self._copies}
        return {n: self._memory.on_host(t) for n, t in others.items()} | self._copies

    def undo(self) -> None:
        """Allocate the memory again and restore its contents."""
        self._memory.undo()
        for name, parts in self._stored.items():
            _fill(self._live[name], parts)
        with torch.no_grad():
            for name, copy in self._copies.items():
                self._live[name].copy_(copy)


def _is_whole(tensor: torch.Tensor, parts: Sequence[OffloadedPart]) -> bool:
    same = all(part.data.dtype == tensor.dtype for part in parts)
    if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return False  # it is expanded: its elements share memory, so they cannot be written one by one
    return same and sum(part.data.numel() for part in parts) == tensor.numel()


@torch.no_grad()
def _fill(tensor: torch.Tensor, parts: Sequence[OffloadedPart]) -> None:
    for part in parts:
        target = segment_view(tensor, part.segment)[part.index]
        target.copy_(part.data.view(target.shape))
