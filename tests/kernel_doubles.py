"""Doubles of the GPU's kernels and memory, on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from weightsync.errors import TransportError
from weightsync.holder import second_copy
from weightsync.memory import quantizing_tables
from weightsync.memory.digests import BoxPart, box_digests
from weightsync.memory.quantize import quantize
from weightsync.plan.copies import Copies


class CopyTable:
    def __init__(self, copies: Copies, bounds: Sequence[int], _: int | None = None) -> None:
        self._rows, self._bounds = copies.table().tolist(), bounds

    def launch(self, group: int, _: object) -> None:
        for src, dst, rows, nbytes, src_pitch, dst_pitch in self._rows[
            slice(*self._bounds[group : group + 2])
        ]:
            for row in range(rows):
                ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, nbytes)


class DeviceBuffer:
    """Memory that is never short, unless `num_short` of the next are."""

    num_short = 0

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> DeviceBuffer:
        if cls.num_short:
            cls.num_short -= 1
            raise TransportError(f"no {nbytes} bytes of GPU memory are left")
        return cls(nbytes)

    def close(self) -> None:
        self.tensor = torch.zeros(0, dtype=torch.uint8)


class DigestTable:
    def __init__(self, parts: Sequence[BoxPart], num_tensors: int, totals: torch.Tensor) -> None:
        self._parts, self._num_tensors, self._totals = parts, num_tensors, totals

    def launch(self, _: object) -> None:
        digests = box_digests(self._parts, self._num_tensors)
        self._totals[0] += torch.from_numpy(digests.view(np.int64))


class QuantizedMatrix:
    def __init__(self, *args: object) -> None:
        self.args = args

    @classmethod
    def of(cls, *args: object) -> QuantizedMatrix:
        return cls(*args)


class QuantizeTable:
    def __init__(self, matrices: Sequence[QuantizedMatrix]) -> None:
        self._matrices = matrices

    def launch(self, _: object) -> None:
        for matrix in self._matrices:
            weight, form, values, scales = matrix.args
            for target, (_, made) in zip((values, scales), quantize(weight, form), strict=True):
                target.copy_(made)


class LaunchGraph:
    def __init__(self, launch: Callable[[object], None]) -> None:
        self.launch = launch


class Stream:
    def synchronize(self) -> None: ...

    def record_event(self) -> Stream:
        return self


def use_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `quantizing_tables` use these in place of kernels, streams and devices."""
    for double in (CopyTable, LaunchGraph, QuantizedMatrix, QuantizeTable):
        monkeypatch.setattr(quantizing_tables, double.__name__, double)
    monkeypatch.setattr(quantizing_tables, "box_table", DigestTable)
    monkeypatch.setattr(quantizing_tables, "can_quantize", lambda _, form: not form.packed)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)


def use_memory_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `second_copy` use these in place of a GPU's memory, kernel and stream."""
    for double in (CopyTable, DeviceBuffer):
        monkeypatch.setattr(second_copy, double.__name__, double)
    monkeypatch.setattr(DeviceBuffer, "num_short", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
