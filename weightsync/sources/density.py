"""Samples a rank's weights, to say how many elements change from one version to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from zlib import crc32

import torch

from weightsync.deltas.density import group
from weightsync.plan import Plan
from weightsync.protocol.messages import Sample

EVERY = 64
"""One of so many rows is sampled."""
_ROW = 1024
"""Elements of a row of a tensor with one dimension."""
_Key = tuple[str, torch.dtype]
"""A group of tensors, and the dtype in which they travel."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DensitySample:
    """Rows of weights, and their values in the version before.

    A row is compared in the dtype in which it travels. The memory for it is 1/64 of the weights.
    """

    def __init__(self, plan: Plan, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """`parts`: tensors' numbers in the plan and live elements of them, in any shape and dtype."""
        self._rows: dict[_Key, list[torch.Tensor]] = {}
        self._numel = Counter[_Key]()
        for number, part in parts:
            meta = plan.tensors[number]
            key = group(meta.name), getattr(torch, meta.dtype)
            if part.numel():
                self._rows.setdefault(key, []).append(_sampled(part.detach(), meta.name))
                self._numel[key] += part.numel()
        self._before: dict[_Key, torch.Tensor] = {}

    def changed(self) -> Mapping[str, Sample]:
        """Return what changed in the sampled rows since the last call, by group of tensors.

        Returns nothing the first time.
        """
        before = self._before
        self._before = {key: _joined(key[1], rows) for key, rows in self._rows.items()}
        found: dict[str, Sample] = {}
        for key, old in before.items():
            (name, dtype), numel = key, self._numel[key]
            num_changed = int((old != self._before[key]).count_nonzero())
            its = Sample(old.numel(), num_changed, numel, numel * dtype.itemsize)
            found[name] = Sample(*map(sum, zip(its, found.get(name, (0, 0, 0, 0)), strict=True)))
        return found


def _joined(dtype: torch.dtype, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return a copy of the elements in the dtype that travels, as integers: one dimension."""
    return torch.cat([each.to(dtype).flatten() for each in rows]).view(_INTEGERS[dtype.itemsize])


def _sampled(part: torch.Tensor, name: str) -> torch.Tensor:
    """Return one of 64 rows, the first one by the tensor's name, at least one row."""
    if part.dim() < 2:
        flat = part.reshape(-1)
        if flat.numel() < EVERY * _ROW:
            return flat[:_ROW]
        part = flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)
    first = crc32(name.encode()) % min(EVERY, part.shape[0])
    return part[first::EVERY]
