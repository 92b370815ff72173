"""Rows in FP8 (e4m3) with a float32 scale for each 128 values."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128
_LARGEST = 448.0
_LEAST = 1e-4
"""The least of a block's largest value, so that scales are not zero."""


class Fp8Rows(NamedTuple):
    """Rows with scales. A value is the FP8 value times the scale of its block of 128 columns.

    Attributes:
        values: float8_e4m3fn[n, hidden].
        scales: float32[n, hidden / 128, rounded up].
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def split(cls, data: torch.Tensor, hidden: int) -> Fp8Rows:
        """Read rows of `quantised`."""
        return cls(_as(data[:, :hidden], torch.float8_e4m3fn), _as(data[:, hidden:], torch.float32))

    def dequantised(self) -> torch.Tensor:
        """Return the rows as float32."""
        scales = self.scales.repeat_interleave(BLOCK, 1)[:, : self.values.shape[1]]
        return self.values.float() * scales


def quantised(x: torch.Tensor) -> torch.Tensor:
    """Return FP8 values and, behind them, scales of each row: uint8[n, hidden + 4 * scales]."""
    padded = torch.nn.functional.pad(x.detach().float(), (0, -x.shape[1] % BLOCK))
    blocks = padded.view(len(x), padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(2).clamp(min=_LEAST) / _LARGEST
    values = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)[:, : x.shape[1]]
    return torch.cat([_as(values, torch.uint8), _as(scales, torch.uint8)], 1)


def _as(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of `data` as `dtype`. Unlike `contiguous`, this also sets strides of empty tensors."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype)
