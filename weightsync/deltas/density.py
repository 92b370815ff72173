"""How much of a version changed, from samples of trainer ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from weightsync.deltas.tiles import expected_nbytes
from weightsync.protocol.messages import Sample
from weightsync.report import Density


def group(name: str) -> str:
    """Return the name of a tensor's group: tensors whose names differ only in numbers, ``*`` for these."""
    return re.sub(r"\d+", "*", name)


def densities(samples: Iterable[Mapping[str, Sample]]) -> Mapping[str, Density]:
    """Add up the ranks' samples of each group."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        for name, its in sample.items():
            found.setdefault(name, []).append(its)
    return {name: _density(its) for name, its in found.items()}


def _density(samples: Iterable[Sample]) -> Density:
    num, num_changed, numel, nbytes = map(sum, zip(*samples, strict=True))
    changed = num_changed / num
    return Density(changed, num, nbytes, round(expected_nbytes(numel, nbytes // numel, changed)))
