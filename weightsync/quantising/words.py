"""Packs small unsigned values in words of 32 bits."""

from __future__ import annotations

import torch


def in_words(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Pack uint8[rows, columns] along rows in int32, the first value in the lowest bits.

    The last word of a row is filled with zeros.
    """
    per_word = 32 // num_bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    words = padded.view(len(values), -1, per_word).to(torch.int32)
    shifts = torch.arange(per_word, device=values.device, dtype=torch.int32) * num_bits
    return (words << shifts).sum(2, dtype=torch.int32)
