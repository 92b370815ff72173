"""A 64-bit digest of a tensor, independent of how the tensor is sharded.

With the bits of element i as the unsigned word ``w[i]`` (8-byte elements count as two words)::

    digest = sum over i of  row[i // 4096] * column[i % 4096] * (w[i] + 1)   modulo 2**64

`row` and `column` are odd pseudo-random 64-bit numbers. Smaller words share one number per lane of 4 bytes,
shifted by the bits of the words before, so that one product serves the whole lane.

Digests of disjoint shards add up to the digest of the whole. One changed bit always changes the sum, since an
odd factor times a power of two below 2**64 is not zero modulo 2**64. Exchanged elements or rows change the
sum except for one chance in 2**32. The digest detects faults, not forgeries.

Sources: multilinear hashing (Carter and Wegman 1979; Lemire and Kaser, "Strongly universal string
hashing is fast", 2014) for the sum of products; SplitMix64 (Steele, Lea and Flood 2014) for the numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightsync.memory.kernels.device_kernels import DigestTable
from weightsync.memory.kernels.digest_factors import (
    LANE_NBYTES,
    WORD_NBYTES,
    column_factors,
    lane_factors,
    lane_ones,
)
from weightsync.memory.kernels.digest_tiles import DigestPart
from weightsync.memory.tensors import byte_strides
from weightsync.plan import Box, Plan, Segment
from weightsync.protocol.messages import Digests

_Words = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
_WORD_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def tensor_digest(data: torch.Tensor, shape: Sequence[int], box: Box | None = None) -> int:
    """Return the share of `box` in the digest of a tensor of `shape`.

    Args:
        data: the box's elements, any dtype and device; shape ``box.extent``.
        shape: the whole tensor's shape, by which elements are numbered.
        box: the position of `data` in the tensor; None for the whole tensor.
    """
    if data.numel() == 0:
        return 0
    if data.is_cuda:
        return int(box_digests([BoxPart(0, data, tuple(shape), box or Box.whole(shape))], 1)[0])
    from weightsync.memory.kernels.host_kernels import digest

    itemsize = data.element_size()
    flat = data.detach().cpu().contiguous().reshape(-1)
    word = WORD_NBYTES[itemsize]
    starts, run = runs(tuple(shape), box) if box else (np.zeros(1, np.int64), flat.numel())
    per_element = itemsize // word
    starts, run = starts * per_element, run * per_element
    if in_lanes(starts, run, word, flat.data_ptr()):
        starts, run = starts * word // LANE_NBYTES, run * word // LANE_NBYTES
        words: _Words = host_bytes(flat).view(np.uint32)
        return int(digest(words, starts, run, lane_factors(word), lane_ones(word)))
    words = host_bytes(flat).view(_WORD_TYPES[word])
    return int(digest(words, starts, run, column_factors(word), 1))


def in_lanes(starts: npt.NDArray[np.int64], run: int, word: int, address: int) -> bool:
    """Return True if all runs of words begin and end at lanes of a row, and are aligned to lanes."""
    per_lane = LANE_NBYTES // word
    return run % per_lane == 0 and address % LANE_NBYTES == 0 and not (starts % per_lane).any()


def host_bytes(data: torch.Tensor) -> npt.NDArray[np.uint8]:
    """View the memory of a contiguous host tensor, while the tensor lives: uint8[data.nbytes].

    After ``Tensor.numpy`` `Offload` could never free the tensor's memory.
    """
    memory = (ctypes.c_uint8 * data.nbytes).from_address(data.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


def warm_up() -> None:
    """Load or compile the kernel for every word size, so that no update waits for it."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        tensor_digest(torch.zeros(1, dtype=dtype), (1,))


@dataclass(frozen=True, slots=True)
class BoxPart:
    """`data` of `box` of a tensor of `shape`. `number` is the index of the tensor's digest."""

    number: int
    data: torch.Tensor
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def whole(cls, number: int, data: torch.Tensor) -> BoxPart:
        """Return a whole tensor."""
        return cls(number, data, tuple(data.shape), Box.whole(data.shape))


def tensor_digests(tensors: Sequence[torch.Tensor]) -> Digests:
    """Return the digests of whole tensors of one device, on a GPU by one launch: uint64[len(tensors)]."""
    return box_digests([BoxPart.whole(number, each) for number, each in enumerate(tensors)], len(tensors))


def box_digests(parts: Sequence[BoxPart], num_tensors: int) -> Digests:
    """Return the sum over each tensor's parts: uint64[num_tensors]. All parts are on one device.

    On a GPU this needs one launch.
    """
    on_gpu = next((part.data.device for part in parts if part.data.is_cuda), None)
    if on_gpu is not None:
        with torch.cuda.device(on_gpu):
            table = box_table(parts, num_tensors)
            table.launch(torch.cuda.current_stream())
            return table.result()
    digests = np.zeros(num_tensors, np.uint64)
    shares = np.array([tensor_digest(part.data, part.shape, part.box) for part in parts], np.uint64)
    np.add.at(digests, [part.number for part in parts], shares)
    return digests


class DigestSums:
    """Digests of tensors whose parts arrive one after the other, on one device. `add` does not wait."""

    def __init__(self, num_tensors: int) -> None:
        self._digests = np.zeros(num_tensors, np.uint64)
        self._totals: torch.Tensor | None = None

    def add(self, parts: Sequence[BoxPart]) -> None:
        """Add the content of `parts`, on a GPU after earlier work of the current stream."""
        on_gpu = next((part.data.device for part in parts if part.data.is_cuda), None)
        if on_gpu is None:
            self._digests += box_digests(parts, len(self._digests))
            return
        with torch.cuda.device(on_gpu):
            if self._totals is None:
                self._totals = torch.zeros((2, len(self._digests)), dtype=torch.int64, device=on_gpu)
            box_table(parts, len(self._digests), self._totals).launch(torch.cuda.current_stream())

    def result(self) -> Digests:
        """Wait for all added parts; return each tensor's sum: uint64[num_tensors]."""
        if self._totals is None:
            return self._digests
        return self._digests + self._totals[0].cpu().numpy().view(np.uint64)


def box_table(parts: Sequence[BoxPart], num_tensors: int, totals: torch.Tensor | None = None) -> DigestTable:
    """Return a table of parts on the current device, valid while the addresses stay the same."""
    return DigestTable([_part(each) for each in parts if each.data.numel()], num_tensors, totals=totals)


def segment_parts(
    plan: Plan, segments: Sequence[Sequence[Segment]], address: Mapping[str, int]
) -> list[DigestPart]:
    """Return the parts of a rank's segments, given for each tensor of the plan.

    `address` has the first byte of each buffer.
    """
    return [
        DigestPart(
            tensor=tensor,
            address=address[segment.buffer] + segment.byte_offset,
            strides=segment.strides,
            box=segment.box,
            shape=plan.tensors[tensor].shape,
            itemsize=plan.tensors[tensor].itemsize,
        )
        for tensor, held in enumerate(segments)
        for segment in held
    ]


def digest_table(tensors: Sequence[torch.Tensor]) -> DigestTable:
    """Return a table of whole tensors on the current device, valid while the addresses stay the same."""
    return box_table([BoxPart.whole(number, each) for number, each in enumerate(tensors)], len(tensors))


def _part(part: BoxPart) -> DigestPart:
    return DigestPart(
        tensor=part.number,
        address=part.data.data_ptr(),
        strides=byte_strides(part.data),
        box=part.box,
        shape=part.shape,
        itemsize=part.data.element_size(),
    )


def runs(shape: tuple[int, ...], box: Box) -> tuple[npt.NDArray[np.int64], int]:
    """Return the global start index of each contiguous run of `box`, and the runs' length."""
    split = len(shape)
    run = 1
    while split > 0:
        split -= 1
        run *= box.extent[split]
        if box.extent[split] != shape[split]:
            break
    starts = np.zeros(1, dtype=np.int64)
    strides = Box.whole(shape).strides(1)
    for axis in range(split):
        along = (box.offset[axis] + np.arange(box.extent[axis], dtype=np.int64)) * strides[axis]
        starts = (starts[:, None] + along[None, :]).reshape(-1)
    return starts + sum(box.offset[axis] * strides[axis] for axis in range(split, len(shape))), run
