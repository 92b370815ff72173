"""Publishes weights that a holder reads in place: only digests are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import torch

from weightsync.memory.kernels.device_kernels import DigestTable
from weightsync.memory.kernels.digest_tiles import DigestPart
from weightsync.memory.kernels.nonfinite import count_nonfinite, word_mask
from weightsync.memory.tensors import byte_strides
from weightsync.plan import Box, Plan
from weightsync.protocol.messages import Digests, Published, combine

_SCRATCH_NBYTES = 64 << 20
_ALIGN = 16


Part: TypeAlias = tuple[int, Box, torch.Tensor]
"""A tensor's number in the plan, a box of it, and the box's elements in device memory, in any dtype."""
_Cast: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A part that travels in another dtype, and its place in the scratch buffer."""


class InPlace:
    """One epoch's parts in device memory. A holder has mapped it, so it must not move.

    Attributes:
        parts: this rank's share.
    """

    def __init__(self, plan: Plan, parts: Sequence[Part], device: torch.device) -> None:
        """Prepare the digests of `parts`, this rank's share. `device` is the GPU of all."""
        self._plan, self.parts = plan, tuple(parts)
        self._held = [held for _, _, held in parts]
        self._addresses, self._num_frees = self._find(), _num_frees(device)
        digested, casts = [], []
        for part in parts:
            if part[2].dtype == self._dtype(part[0]):
                digested.append(self._part(part))
            else:
                casts.append(part)
        # Calls arrive on other threads, on which another GPU may be current.
        self._device = device
        with torch.cuda.device(device):
            self._table = DigestTable(digested, len(plan.tensors))
            self._batches = self._batch(casts)

    def has_memory(self) -> bool:
        """Return True if the memory that was given is still allocated. The model may use other memory by now.

        It lives as long as the tensors that this object holds, unless their storage was resized. Even then it
        stays allocated, in torch's cache, until torch gives memory back to the GPU. To ask torch whether it
        has is faster than to look at ten thousands of tensors.
        """
        if (num_frees := _num_frees(self._device)) is not None and num_frees == self._num_frees:
            return True
        if self._find() != self._addresses:
            return False
        self._num_frees = num_frees
        return True

    def wait_written(self) -> None:
        """Wait until the weights are written."""
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        """Start to digest the weights, once they are written. Needs `has_memory`."""
        self.wait_written()
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._table.launch(stream)
            for casts, table in self._batches:
                for source, target in casts:
                    target.copy_(source)
                table.launch(stream)

    def result(self, count: bool) -> Published:
        """Wait for the digests of the last `begin`."""
        with torch.cuda.device(self._device):
            tables = [self._table, *(table for _, table in self._batches)]
            digests = combine([table.result() for table in tables])
            flagged = {tensor for table in tables for tensor in table.flagged()} if count else set()
            return Published(digests, self._count(flagged) if flagged else {})

    def digest_again(self) -> Digests:
        """Digest the weights as they are now."""
        self.begin()
        return self.result(count=False).digests

    def _find(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._held))

    def _count(self, flagged: set[int]) -> dict[str, int]:
        """Count NaN and Inf in the dtype that travels."""
        counts = Counter[str]()
        for tensor, _, held in self.parts:
            if tensor in flagged:
                sent = held.to(self._dtype(tensor))
                counts[self._plan.tensors[tensor].name] += count_nonfinite(sent)
        return {name: count for name, count in counts.items() if count}

    def _batch(self, casts: Sequence[Part]) -> list[tuple[list[_Cast], DigestTable]]:
        """Group casts into batches that share one scratch buffer, and digest what they write there."""
        nbytes = [box.numel * self._plan.tensors[tensor].itemsize for tensor, box, _ in casts]
        size = max(_SCRATCH_NBYTES, *nbytes) if casts else 0
        scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
        batches: list[tuple[list[_Cast], list[DigestPart]]] = []
        at = size
        for (tensor, box, held), needed in zip(casts, nbytes, strict=True):
            if at + needed > size:
                batches.append(([], []))
                at = 0
            target = scratch[at : at + needed].view(self._dtype(tensor)).view(box.extent)
            batches[-1][0].append((held, target))
            batches[-1][1].append(self._part((tensor, box, target)))
            at += -(-needed // _ALIGN) * _ALIGN
        return [(copies, DigestTable(parts, len(self._plan.tensors))) for copies, parts in batches]

    def _dtype(self, tensor: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._plan.tensors[tensor].dtype)
        return dtype

    def _part(self, part: Part) -> DigestPart:
        tensor, box, data = part
        meta = self._plan.tensors[tensor]
        return DigestPart(
            tensor=tensor,
            address=data.data_ptr(),
            strides=byte_strides(data),
            box=box,
            shape=meta.shape,
            itemsize=meta.itemsize,
            mask=word_mask(meta.dtype),
        )


def _num_frees(device: torch.device) -> int | None:
    """Return how often torch gave memory of a GPU back to it. None if its allocator does not count that."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    stats: dict[str, int] = torch.cuda.memory_stats_as_nested_dict(device)
    return stats.get("num_device_free")
