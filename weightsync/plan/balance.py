"""Boxes that lie one behind the other in files, dealt out in shares of about the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from weightsync.plan.box import Box

__all__ = ["Stretch", "deal"]

_WHOLE_NBYTES = 1 << 20
"""A share of a box that would be smaller is not worth a piece of its own: the box goes to one."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """`box` of `tensor`, elements in row-major order, from byte `start` of buffer number `buffer` on."""

    tensor: str
    box: Box
    itemsize: int
    buffer: int
    start: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def split(self, num_parts: int) -> Iterator[Stretch]:
        """At most `num_parts` runs of rows; the tails are shorter."""
        axis = next((a for a, extent in enumerate(self.box.extent) if extent > 1), None)
        if axis is None or num_parts == 1:
            yield self
            return
        rows = -(-self.box.extent[axis] // num_parts)
        start = self.start
        for box in self.box.split(rows * prod(self.box.extent[axis + 1 :])):
            yield Stretch(self.tensor, box, self.itemsize, self.buffer, start)
            start += box.numel * self.itemsize


def deal(stretches: Sequence[Stretch], num_shares: int) -> list[list[Stretch]]:
    """As many shares, each with rows of every large box, so that each bucket comes from all of them.

    What a share is depends on tensors and boxes alone, not on where they lie: checkpoints of one
    model are dealt alike. Boxes without elements are left out.
    """
    shares: list[list[Stretch]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for stretch in sorted(stretches, key=lambda each: (each.tensor, each.box.offset)):
        if not stretch.nbytes:
            continue
        whole = stretch.nbytes < _WHOLE_NBYTES * num_shares
        order = sorted(range(num_shares), key=loads.__getitem__)
        for share, part in zip(order, stretch.split(1 if whole else num_shares), strict=False):
            shares[share].append(part)
            loads[share] += part.nbytes
    return shares
