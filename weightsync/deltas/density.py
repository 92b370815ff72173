"""How much of a version changed, from samples of trainer ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from weightsync.deltas.tiles import expected_nbytes
from weightsync.plan import TensorMeta
from weightsync.report import Density


def group(name: str) -> str:
    """Return the name of a tensor's group: tensors whose names differ only in numbers, ``*`` for these."""
    return re.sub(r"\d+", "*", name)


def densities(
    tensors: Sequence[TensorMeta], samples: Iterable[Mapping[str, tuple[int, int]]]
) -> Mapping[str, Density]:
    """Add up the ranks' samples of each group, as in `PublishReport.changed`. `tensors`: all of the plan."""
    sampled, changed = Counter[str](), Counter[str]()
    for sample in samples:
        for name, (num, found) in sample.items():
            sampled[name] += num
            changed[name] += found
    nbytes, deltas = Counter[str](), Counter[str]()
    for meta in tensors if sampled else ():
        if found := sampled[name := group(meta.name)]:
            nbytes[name] += meta.nbytes
            deltas[name] += round(expected_nbytes(meta.numel, meta.itemsize, changed[name] / found))
    return {
        name: Density(changed[name] / num, num, nbytes[name], deltas[name]) for name, num in sampled.items()
    }
