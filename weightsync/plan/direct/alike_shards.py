"""Groups the boxes of one tensor of each kind. All trainer ranks hold the tensors of a kind alike."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weightsync.plan.layout.layout import Int64, Layout
from weightsync.plan.layout.match import Match, Shards
from weightsync.plan.layout.tensor_rows import first_alike
from weightsync.plan.layout.trainers_layout import StatedLayout

_MOST_ITEMSIZE = 32
"""Above the bytes of any element."""


@dataclass(frozen=True, slots=True, eq=False)
class AlikeShards:
    """The T tensors that are sent, in K kinds.

    Attributes:
        kind: int64[T], the kind of each tensor.
        first: int64[K], the tensor that stands for each kind.
        listed: the source's layout of these tensors.
        shards: the boxes of these tensors. Box by box, `shards.tensor` is the kind.
    """

    kind: Int64
    first: Int64
    listed: Layout
    shards: Shards

    @classmethod
    def of(cls, source: StatedLayout, matched: Match) -> AlikeShards:
        """Group the tensors of `matched`, and prove that boxes tile all tensors. Raises as `Shards.of`."""
        itemsize = np.array([meta.itemsize for meta in matched.tensors], np.int64)
        code = first_alike(source.stated)[matched.source] * _MOST_ITEMSIZE + itemsize
        _, first, kind = np.unique(code, return_index=True, return_inverse=True)
        kept = np.zeros(len(source.stated.tensors), np.bool_)
        kept[matched.source[first]] = True
        listed = source.of_tensors(kept)
        part = replace(
            matched,
            tensors=tuple(matched.tensors[t] for t in first.tolist()),
            source=(np.cumsum(kept) - 1)[matched.source[first]],
        )
        return cls(kind.astype(np.int64), first.astype(np.int64), listed, Shards.of(listed, part))
