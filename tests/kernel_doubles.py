"""Doubles of the GPU's kernels that quantise in place, computed on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch

from weightsync.engines import quantizing_sink
from weightsync.memory.digests import BoxPart, box_digests
from weightsync.memory.quantize import quantize
from weightsync.plan.copies import Copies
from weightsync.protocol.messages import Digests


class CopyTable:
    def __init__(self, copies: Copies, bounds: Sequence[int]) -> None:
        self._rows, self._bounds = copies.table().tolist(), bounds

    def launch(self, group: int, _: object) -> None:
        for src, dst, rows, nbytes, src_pitch, dst_pitch in self._rows[
            slice(*self._bounds[group : group + 2])
        ]:
            for row in range(rows):
                ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, nbytes)


class DigestTable:
    def __init__(self, parts: Sequence[BoxPart], num_tensors: int) -> None:
        self._parts, self._num_tensors = parts, num_tensors

    def launch(self, _: object) -> None:
        self._digests = box_digests(self._parts, self._num_tensors)

    def result(self) -> Digests:
        return self._digests


class QuantizeLaunch:
    kernel = "reference"

    def __init__(self, *args: object) -> None:
        self._args = args

    @classmethod
    def of(cls, *args: object) -> QuantizeLaunch:
        return cls(*args)

    def load(self) -> None: ...

    def launch(self, _: object) -> None:
        weight, form, values, scales = self._args
        for target, (_, made) in zip((values, scales), quantize(weight, form), strict=True):
            target.copy_(made)


class Stream:
    def synchronize(self) -> None: ...

    def record_event(self) -> Stream:
        return self


def use_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `quantizing_sink` use these in place of kernels, streams and devices."""
    for double in (CopyTable, QuantizeLaunch):
        monkeypatch.setattr(quantizing_sink, double.__name__, double)
    monkeypatch.setattr(quantizing_sink, "box_table", DigestTable)
    monkeypatch.setattr(quantizing_sink, "can_quantize", lambda _, form: not form.packed)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
