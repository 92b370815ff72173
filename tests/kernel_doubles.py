"""Doubles of the GPU's kernels and memory, on a CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from weightsync.deltas import device_tiles
from weightsync.deltas.tiles import Code, Tile, difference
from weightsync.errors import TransportError, WireError
from weightsync.holder import quantizing_copy, second_copy
from weightsync.memory import cuda, host
from weightsync.memory.kernels.digests import BoxPart, box_digests, tensor_digest
from weightsync.plan import Box
from weightsync.plan.layout.copies import Copies
from weightsync.plan.layout.formats import Format
from weightsync.quantising import quantizing_reads, quantizing_tables
from weightsync.quantising.quantize import quantize, quantize_together
from weightsync.quantising.quantize_kernels import MatrixDigests

_Places = Sequence[tuple[int, int, int]]
"""Tiles: the offset, the number of elements and the bytes per element."""


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


class MappedTrainers:
    """Trainers' memory in this process."""

    def __init__(self, memory: Mapping[tuple[int, str], torch.Tensor]) -> None:
        self._memory = memory
        self.starts = {key: each.data_ptr() for key, each in memory.items()}

    def rest(self, key: tuple[int, str], offset: int) -> torch.Tensor:
        return self._memory[key].flatten().view(torch.uint8)[offset:]

    def touch(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class QuantizedMatrix:
    weight: torch.Tensor
    form: Format
    values: torch.Tensor
    scales: torch.Tensor
    digests: MatrixDigests

    @classmethod
    def of(cls, *args: Any) -> QuantizedMatrix:
        return cls(*args)


class QuantizeTable:
    def __init__(
        self, matrices: Sequence[QuantizedMatrix], sources: torch.Tensor, stored: torch.Tensor
    ) -> None:
        self._matrices, self._sources, self._stored = matrices, sources, stored

    def launch(self, _: object) -> None:
        for each in self._matrices:
            put(each, quantize(each.weight, each.form), self._sources, self._stored)


class SharedScaleTable:
    def __init__(
        self, groups: Sequence[Sequence[QuantizedMatrix]], sources: torch.Tensor, stored: torch.Tensor
    ) -> None:
        self._groups, self._sources, self._stored = groups, sources, stored

    def launch(self, _: object) -> None:
        for its in self._groups:
            assert len({each.scales.data_ptr() for each in its}) == 1
            made = quantize_together([each.weight for each in its], [each.form for each in its])
            for each, parts in zip(its, made, strict=True):
                put(each, parts, self._sources, self._stored)

    def changed(self) -> list[int]:
        return []


def put(
    matrix: QuantizedMatrix,
    made: Iterable[tuple[str, torch.Tensor]],
    sources: torch.Tensor,
    stored: torch.Tensor,
) -> None:
    """Put what was made of a matrix to its places, and add to the digests."""
    its, (rows, columns) = matrix.digests, matrix.form.block
    width = matrix.form.grid((1, its.width))[1]
    _add_digest(sources, its.source, matrix.weight, (its.row, its.column), its.width)
    for target, (_, data) in zip((matrix.values, matrix.scales), made, strict=True):
        target.copy_(data.view(target.shape))
    _add_digest(stored, its.values, matrix.values, (its.stored_row, its.column), its.width)
    at = its.stored_row // (rows or len(matrix.weight)), its.column // (columns or its.width)
    _add_digest(stored, its.scales, matrix.scales.view(matrix.form.grid(matrix.weight.shape)), at, width)


def _add_digest(
    totals: torch.Tensor, number: int | None, part: torch.Tensor, offset: tuple[int, int], width: int
) -> None:
    """Add the digest of a part of a matrix with `width` columns to one of `totals`."""
    if number is not None:
        digest = tensor_digest(part, (offset[0] + len(part), width), Box(offset, tuple(part.shape)))
        totals[number] += int(np.uint64(digest).view(np.int64))


class ChangeKernels:
    """The kernels of `device_tiles`, which code and apply one tile after another."""

    def __init__(self) -> None:
        self._tiles: Sequence[Tile] = ()

    def launch(self, name: str, _: object, num: int, __: int, args: Sequence[Any]) -> None:
        tiles, *others = map(int, args)
        rows = _memory(tiles, 2 * num, "<i8").reshape(num, 2).tolist()
        places = [(at, packed & 0xFFFF_FFFF, packed >> 32) for at, packed in rows]
        getattr(self, name)(places, *others)

    def find_changes(self, places: _Places, num: int, old: int, new: int, found: int, _: int) -> None:
        self._tiles = [
            difference(*(_memory(base + at, num, f"<u{width}") for base in (old, new)))
            for at, num, width in places
        ]
        table = [(tile.code, len(tile.values), len(tile.index), tile.values.nbytes) for tile in self._tiles]
        _memory(found, 4 * num, "<i8").reshape(4, num).T[:] = table

    def write_changes(self, _: _Places, num: int, *addresses: int) -> None:
        ends, _bits, index, values = addresses[-4:]
        bounds = _memory(ends, 2 * num, "<i8").reshape(2, num).T.tolist()
        for tile, (index_end, values_end) in zip(self._tiles, bounds, strict=True):
            for to, end, data in ((index, index_end, tile.index), (values, values_end, tile.values)):
                _memory(to + end - data.nbytes, data.nbytes, "u1")[:] = data.view(np.uint8)

    def apply_changes(
        self, places: _Places, row: int, table: int, memory: int, index: int, values: int, damaged: int
    ) -> None:
        rows = zip(
            *(_memory(table + 8 * row * i, len(places), "<i8").tolist() for i in range(5)), strict=True
        )
        for (at, num, width), (code, count, size, index_at, values_at) in zip(places, rows, strict=True):
            held = _memory(index + index_at, size, "u1"), _memory(values + values_at, count, f"<u{width}")
            try:
                Tile(Code(code), *held).apply(_memory(memory + at, num, f"<u{width}"))
            except WireError:
                _memory(damaged, 1, "<i8")[0] = 1 + code


def _memory(address: int, num: int, dtype: str) -> Any:
    held: Any = (ctypes.c_uint8 * (num * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(held, dtype)


class LaunchGraph:
    def __init__(self, launch: Callable[[object], None]) -> None:
        self.launch = launch


@dataclass
class Runtime:
    """CUDA's page locks and copies, for torch and CuPy. A copy across the border of two locks is refused.

    Locks beyond `most` are refused, too.
    """

    most: int = sys.maxsize
    locked: dict[int, int] = field(default_factory=dict)
    memcpyDefault = 4  # noqa: N815

    def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:  # noqa: N802
        assert not any(self._parts(address, nbytes)), "locked twice"
        if len(self.locked) == self.most:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    def memcpyAsync(self, target: int, source: int, nbytes: int, _: int, __: int) -> None:  # noqa: N802
        for address in (target, source):
            if any(part != nbytes for part in self._parts(address, nbytes)):
                raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        ctypes.memmove(target, source, nbytes)

    def setDevice(self, _: int) -> None: ...  # noqa: N802

    def _parts(self, address: int, nbytes: int) -> Iterator[int]:
        """Yield how many of the bytes are in each lock."""
        for at, its in [*self.locked.items()]:  # of any thread
            if (part := min(address + nbytes, at + its) - max(address, at)) > 0:
                yield part


class Stream:
    cuda_stream = 0

    def synchronize(self) -> None: ...

    def record_event(self) -> Stream:
        return self

    def wait_event(self, _: Stream) -> None: ...


def use_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what quantises use these in place of kernels, streams and devices."""
    for module in (quantizing_tables, quantizing_reads):
        for double in (LaunchGraph, QuantizedMatrix, QuantizeTable):
            monkeypatch.setattr(module, double.__name__, double)
        monkeypatch.setattr(module, "box_table", DigestTable)
    monkeypatch.setattr(quantizing_reads, "SharedScaleTable", SharedScaleTable)
    monkeypatch.setattr(quantizing_reads, "can_share_scale", lambda *_: True)
    for module in (quantizing_tables, quantizing_copy):
        monkeypatch.setattr(module, "CopyTable", CopyTable)
    monkeypatch.setattr(quantizing_copy, "MappedTrainers", MappedTrainers)
    monkeypatch.setattr(quantizing_tables, "can_quantize", lambda _, form: not form.packed)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)


def use_change_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `device_changes` use these in place of kernels, streams and the device's memory."""
    monkeypatch.setattr(device_tiles, "DEVICE", "cpu")
    monkeypatch.setattr(cuda, "launch", ChangeKernels().launch)
    monkeypatch.setattr(cuda, "load", lambda _: None)
    monkeypatch.setattr(cuda, "copy", lambda to, source, nbytes, _: ctypes.memmove(to, source, nbytes))
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)


def use_memory_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `second_copy` use these in place of a GPU's memory, copies, kernel and stream."""
    use_runtime(monkeypatch)
    for double in (CopyTable, DeviceBuffer):
        monkeypatch.setattr(second_copy, double.__name__, double)
    monkeypatch.setattr(DeviceBuffer, "num_short", 0)


def use_runtime(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime | None = None, part_nbytes: int = 512
) -> Runtime:
    """Have memory page-locked and copied by `runtime`, and return it. Parts have `part_nbytes` bytes."""
    runtime = runtime or Runtime()
    monkeypatch.setattr(host, "PART_NBYTES", part_nbytes)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", _check)
    return runtime


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}")
