"""A trainer rank's weights as the holder sees them: tensors in either memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch

from weightsync.memory.host import num_threads
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Plan, RankLayout, share_in_place
from weightsync.protocol.messages import Digests

Part: TypeAlias = tuple[int, Box, torch.Tensor]
"""A tensor's number in the plan, a box of it, and the box's elements in any dtype."""

_BATCH = 64
"""Parts digested at a time. Some are copies that exist only while they are in a batch."""


def copied_parts(plan: Plan, trainer: int, send_buffer: torch.Tensor) -> Iterator[Part]:
    """Yield the parts that `trainer` sends, as views of the send buffer or of a copy: uint8[n]."""
    for piece in plan.trainer_pieces(trainer):
        held = send_buffer[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
        yield piece.tensor, piece.box, held.view(_dtype(plan, piece.tensor)).view(piece.box.extent)


def parts_in_place(
    plan: Plan, trainer: int, layout: RankLayout, memory: Mapping[str, torch.Tensor]
) -> Iterator[Part]:
    """Yield the share of `trainer`, see `share_in_place`, as views of the trainer's memory.

    `memory` has the buffers of `layout`: uint8, one dimension.
    """
    dtypes = {meta.name: getattr(torch, meta.dtype) for meta in layout.tensors}
    for tensor, box, segment in share_in_place(plan, trainer, layout):
        held = segment_view(memory[segment.buffer].view(dtypes[segment.tensor]), segment)
        yield tensor, box, held[box.slices(segment.box)]


def digest_parts(plan: Plan, parts: Iterable[Part]) -> Digests:
    """Digest `parts`, cast to the plan's dtypes: uint64[num_tensors].

    Comparable with the digests that `Source.publish` returned.
    """
    shares = np.zeros(len(plan.tensors), dtype=np.uint64)

    def digest(part: Part) -> tuple[int, int]:
        tensor, box, data = part
        return tensor, tensor_digest(data.to(_dtype(plan, tensor)), plan.tensors[tensor].shape, box)

    some = iter(parts)
    with ThreadPoolExecutor(num_threads(16)) as threads:
        while batch := list(islice(some, _BATCH)):
            for tensor, share in threads.map(digest, batch):
                # A slice wraps around on overflow; a scalar would warn.
                shares[tensor : tensor + 1] += np.uint64(share)
    return shares


def _dtype(plan: Plan, tensor: int) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, plan.tensors[tensor].dtype)
    return dtype
