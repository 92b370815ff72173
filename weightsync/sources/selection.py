"""Chooses which of a rank's tensors travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from weightsync.errors import ConfigError, nearest
from weightsync.plan import RankLayout

__all__ = ["Selection"]


class Selection:
    """Leaves tensors out of a layout, by patterns such as ``value_head.*``, see `fnmatch`."""

    def __init__(self, exclude: Collection[str]) -> None:
        self._exclude = tuple(exclude)

    def check(self, names: Sequence[str]) -> None:
        """Raise ConfigError if a pattern matches none of a model's tensor names."""
        for pattern in self._exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError("exclude", pattern, nearest(pattern, names))

    def of(self, layout: RankLayout) -> RankLayout:
        """Return `layout` without what is excluded."""
        if not self._exclude:
            return layout
        kept = {meta.name for meta in layout.tensors if not self._excludes(meta.name)}
        return dataclasses.replace(
            layout,
            tensors=tuple(meta for meta in layout.tensors if meta.name in kept),
            segments=tuple(segment for segment in layout.segments if segment.tensor in kept),
            tied=tuple(pair for pair in layout.tied if pair[1] in kept),
        )

    def _excludes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._exclude)
