"""The factors of digests on the current device, uploaded once for all tables."""

from __future__ import annotations

import functools

import torch

from weightsync.memory.kernels.digest_factors import lane_factors, row_factors
from weightsync.protocol.messages import Digests


def lanes_on_device(word: int) -> torch.Tensor:
    """Return `lane_factors` as int64."""
    return _lanes(torch.cuda.current_device(), word)


def rows_on_device(num_rows: int) -> torch.Tensor:
    """Return `row_factors` as int64, of at least `num_rows` rows."""
    return _rows(torch.cuda.current_device(), 1 << max(0, num_rows - 1).bit_length())


@functools.cache
def _lanes(_: int, word: int) -> torch.Tensor:
    return _uploaded(lane_factors(word))


@functools.cache
def _rows(_: int, num_rows: int) -> torch.Tensor:
    return _uploaded(row_factors(num_rows))


def _uploaded(factors: Digests) -> torch.Tensor:
    return torch.from_numpy(factors.view("int64")).cuda()
