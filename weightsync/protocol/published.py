"""What a trainer rank says of the weights that it published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.memory.digests import Digests

__all__ = ["Published"]


@dataclass(frozen=True, slots=True)
class Published:
    """Of this rank's share of each tensor of the plan.

    Attributes:
        digests: uint64[num_tensors]; the shares of all ranks add up to the tensor's digest.
        nonfinite: elements that are NaN or Inf, by the tensor's name, of tensors that have any.
    """

    digests: Digests
    nonfinite: Mapping[str, int]
