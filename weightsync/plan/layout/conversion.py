"""Conversions of tensors between the trainers' memory and an engine's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from weightsync.plan.layout.layout import Layout
from weightsync.plan.layout.segment import AS_STORED, TensorMeta
from weightsync.text import count_text

IDENTITY, LOAD = "identity", "load"

Casts: TypeAlias = Mapping[tuple[str, str], int]
"""The number of tensors that are cast, by the dtypes before and after."""


def dtypes(tensors: Iterable[TensorMeta], tied: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the dtype of each tensor by name, and of tied (alias, canonical) ones by both names."""
    found = {meta.name: meta.dtype for meta in tensors}
    return found | {alias: found[canonical] for alias, canonical in tied if canonical in found}


def casts(before: Mapping[str, str], after: Iterable[TensorMeta]) -> Casts:
    """Count the tensors of `after` that have another dtype `before`, by name."""
    pairs = ((before.get(meta.name, meta.dtype), meta.dtype) for meta in after)
    return Counter(pair for pair in pairs if pair[0] != pair[1])


def conversion_text(at_source: Casts, at_engine: Casts, converts: str, is_loaded: bool) -> str:
    """Describe all conversions of an engine's tensors: `IDENTITY` if they are copied unchanged.

    Args:
        at_source, at_engine: the casts before sending, and after.
        converts: the engine's conversions, see `RankLayout`.
        is_loaded: whether the engine's own loader gets the tensors.
    """
    parts = [
        f"cast: {count_text(number, 'tensor')} from {before} to {after} at the {side}"
        for side, counts in (("source", at_source), ("engine", at_engine))
        for (before, after), number in sorted(counts.items())
    ]
    if converts not in ("", AS_STORED):
        parts.append(f"quantise: {converts}")
    elif is_loaded:
        parts.append(LOAD)
    return "; ".join(parts) or IDENTITY


def conversion_of(source: Layout, travelling: Sequence[TensorMeta], engine: Layout, converts: str) -> str:
    """Return `conversion_text` of an engine, for `travelling`: tensors of it as they travel."""
    names = {meta.name for meta in travelling}
    return conversion_text(
        casts(dtypes(source.tensors, source.tied), travelling),
        casts(dtypes(travelling), (meta for meta in engine.tensors if meta.name in names)),
        converts,
        not engine.live.metas,
    )
