"""A kernel that copies tokens from all ranks' memory straight to this rank's rows. Needs Triton.

For movers whose ranks map each other's memory, in place of `exchange` and `Routing.placed`. A token is read
once over the link, and written to each of its rows here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def pull_rows(addresses: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy tokens to rows of `out`. Starts on the current stream, and reads nothing back.

    Args:
        addresses: int64[R], each rank's tokens [T, W], on the device.
        rows: int64[R, T, K], a token's rows here, -1 for none: `Routing.mine`.
        out: [capacity, W] of any dtype, contiguous. Other rows stay as they are.
    """
    nbytes = out.shape[1] * out.itemsize
    word = next(size for size in _WORDS if nbytes % size == 0)
    words = out.view(torch.uint8).view(_WORDS[word])
    num_tokens, top_k = rows.shape[1:]
    _pull[(len(rows) * num_tokens,)](addresses, rows, words, num_tokens, top_k, nbytes // word, _BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _pull(addresses, rows, out, num_tokens, top_k, width, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    pair = tl.program_id(0).to(tl.int64)  # a rank's token
    source = tl.load(addresses + pair // num_tokens).to(out.dtype) + pair % num_tokens * width
    last, k = tl.load(rows + pair * top_k), 1
    while k < top_k:
        last = tl.maximum(last, tl.load(rows + pair * top_k + k))
        k += 1
    start = 0
    while start < width:
        column = start + tl.arange(0, block)
        data = tl.load(source + column, mask=(column < width) & (last >= 0))
        k = 0
        while k < top_k:
            row = tl.load(rows + pair * top_k + k)
            tl.store(out + row * width + column, data, mask=(column < width) & (row >= 0))
            k += 1
        start += block
