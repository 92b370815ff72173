"""The segment copy in Triton, to compare with ours.

Import it only with a GPU.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from weightsync.plan.layout.copies import Copies, tiles

__all__ = ["TritonCopy"]

_TILE_NBYTES = 32 << 10
_UNIT_NBYTES = 8  # int64; Triton merges two int64 if they are adjacent and aligned


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy(table, num_tiles, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = tl.arange(0, HEIGHT)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = table + tile * 6
        src = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), 16)
        dst = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int64)), 16)
        rows = tl.load(entry + 2)
        width = tl.multiple_of(tl.load(entry + 3) // 8, 2)
        src_pitch = tl.multiple_of(tl.load(entry + 4) // 8, 2)
        dst_pitch = tl.multiple_of(tl.load(entry + 5) // 8, 2)
        for start in range(0, width, WIDTH):
            at = start + column
            mask = (row < rows) & (at < width)
            values = tl.load(src + row * src_pitch + at, mask=mask)
            tl.store(dst + row * dst_pitch + at, values, mask=mask)


class TritonCopy:
    """Copies whose rows, pitches and addresses are multiples of 16 bytes, in one launch."""

    def __init__(self, copies: Copies, num_blocks: int) -> None:
        table, _ = tiles(copies, _TILE_NBYTES)
        self._table = torch.from_numpy(table).cuda()
        self._num_blocks = min(num_blocks, len(table))
        width = int(table[:, 3].max()) // _UNIT_NBYTES
        self._width = width & -width  # the largest power of two that divides the rows
        self._height = 1 << (int(table[:, 2].max()) - 1).bit_length()

    def launch(self) -> None:
        """Launch on the current stream. Compiles on first use."""
        _copy[(self._num_blocks,)](
            self._table, len(self._table), HEIGHT=self._height, WIDTH=self._width, num_warps=16
        )
