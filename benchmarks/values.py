"""Writes, poisons and compares the expected values of tensors, many tensors at a time.

An element's word depends on tensor, version, row and column. Rows and columns are hashed separately, so that
displaced rows and columns are found for any width of the tensor.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch

from benchmarks.models import Tensor
from weightsync.plan import Box

__all__ = ["Held", "count_wrong", "fill", "poison", "touch"]

Held: TypeAlias = tuple[Tensor, Box, torch.Tensor]
"""A tensor, a box, and the box's memory: 2 bytes per element, contiguous."""

_CHUNK_NUMEL = 1 << 25
_MASK = 0x3FFF  # bfloat16 bits: finite, positive and below 2, so that no model overflows
_FACTORS = (0x9E3779B1, 0x85EBCA77)


def fill(held: Iterable[Held], version: int) -> None:
    """Write the values of `version` to each box."""
    for parts, words in _expected(held, version, compute=True):
        torch._foreach_copy_(parts, [*words.view(parts[0].dtype)])


def touch(held: Iterable[Held], version: int, fraction: float) -> None:
    """Flip the lowest bit of a fraction of all elements. `version` chooses the elements."""
    for parts, words in _expected(held, version, compute=True):
        for part, chosen in zip(parts, _chosen(words, fraction), strict=True):
            part.view(torch.int16).bitwise_xor_(chosen.to(part.device))


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill with bytes of 0xFF, which `fill` never writes."""
    words = [tensor.view(torch.int16) for tensor in tensors if tensor.numel()]
    torch._foreach_zero_(words)
    torch._foreach_sub_(words, 1)


def count_wrong(
    held: Iterable[Held], version: int, touched: Mapping[int, float] = MappingProxyType({})
) -> int:
    """Count the elements that differ in any bit from the values of `fill`, and of `touch` afterwards.

    `touched` has the fraction of each version of `touch`.
    """
    held, versions = list(held), (version, *touched)
    chunks = zip(*(_expected(held, each, compute=False) for each in versions), strict=True)
    wrong = []
    for (parts, words), *later in chunks:
        for (_, others), fraction in zip(later, touched.values(), strict=True):
            words = words ^ _chosen(others, fraction)
        wrong.append((torch.stack(parts).view(torch.int16) != words).sum())
    # Add up on the device: fetching each count would take longer than comparing.
    return int(torch.stack(wrong).sum()) if wrong else 0


def _chosen(words: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return 1 for a fraction of all words, else 0. Each word has its own place in a shuffled order."""
    for factor in _FACTORS:
        words = (words ^ (words >> 7)) * (factor & _MASK | 1) & _MASK
    return (words < fraction * (_MASK + 1)).to(torch.int16)


def _expected(
    held: Iterable[Held], version: int, *, compute: bool
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield parts of equal shape and their int16 words.

    With `compute`, the words are made on a GPU if there is one.

    Most of a model's many thousand tensors are alike. One by one, a tensor would need a dozen launches.
    """
    alike: defaultdict[tuple[tuple[int, ...], Box], list[Held]] = defaultdict(list)
    for each in held:
        if each[1].numel:
            alike[each[0].shape, each[1]].append(each)
    for (shape, box), group in alike.items():
        device = group[0][2].device
        if compute and torch.cuda.is_available():
            device = torch.device("cuda")
        yield from _words(shape, box, group, version, device)


def _words(
    shape: Sequence[int], box: Box, group: Sequence[Held], version: int, device: torch.device
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    names = [f"{tensor.name}/{version}".encode() for tensor, _, _ in group]
    seeds = torch.tensor([zlib.crc32(name) for name in names], device=device)
    columns = _hashed(torch.arange(box.offset[-1], box.end[-1], device=device) + seeds[:, None], _FACTORS[0])
    if box.ndim == 1:
        yield [local for _, _, local in group], columns
        return
    numbers = torch.arange(box.offset[0], box.end[0], device=device)
    for size, low, high in zip(shape[1:-1], box.offset[1:-1], box.end[1:-1], strict=True):
        numbers = numbers[..., None] * size + torch.arange(low, high, device=device)
    rows = _hashed(numbers, _FACTORS[1])[..., None]
    columns = columns.reshape(len(group), *[1] * (box.ndim - 1), -1)
    num_tensors = max(1, _CHUNK_NUMEL // box.numel)
    num_rows = box.extent[0] if num_tensors > 1 else max(1, _CHUNK_NUMEL // math.prod(box.extent[1:]))
    for first in range(0, len(group), num_tensors):
        some = slice(first, first + num_tensors)
        for start in range(0, box.extent[0], num_rows):
            part = slice(start, start + num_rows)
            locals_ = [local[part] for _, _, local in group[some]]
            yield locals_, (rows[part] + columns[some]) & _MASK


def _hashed(numbers: torch.Tensor, factor: int) -> torch.Tensor:
    return (((numbers * factor) >> 9) & _MASK).to(torch.int16)
