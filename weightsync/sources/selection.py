"""Which of a rank's tensors travel, and under which names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from weightsync.errors import ConfigError, nearest
from weightsync.plan import RankLayout

__all__ = ["Names", "Selection"]

Names = Mapping[str, str] | Callable[[str], str]
"""How a trainer's names become a checkpoint's: a prefix for each prefix, or a function of one name."""


class Selection:
    """Renames a layout's tensors, and then leaves some of them out."""

    def __init__(self, exclude: Collection[str] = (), names: Names | None = None) -> None:
        """
        Args:
            exclude: patterns of names that are left out, as of `fnmatch`: ``value_head.*``.
            names: what comes before: see `Names`. Of several prefixes of a name the longest counts.
        """
        self._exclude, self._names = tuple(exclude), names

    def check(self, layout: RankLayout) -> None:
        """Check the selection against all of a model's tensors.

        Raises ConfigError if a prefix begins or a pattern matches none, or if two tensors get one name.
        """
        given = [meta.name for meta in layout.tensors] + [alias for alias, _ in layout.tied]
        for prefix in self._names if isinstance(self._names, Mapping) else ():
            if not any(name.startswith(prefix) for name in given):
                raise ConfigError("names", prefix, nearest(prefix, given))
        self._check_distinct(given)
        named = [meta.name for meta in self._named(layout).tensors]
        for pattern in self._exclude:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ConfigError("exclude", pattern, nearest(pattern, named))

    def of(self, layout: RankLayout) -> RankLayout:
        """Return `layout` with a checkpoint's names, without what is excluded."""
        layout = self._named(layout)
        if not self._exclude:
            return layout
        kept = {meta.name for meta in layout.tensors if not self._excludes(meta.name)}
        return dataclasses.replace(
            layout,
            tensors=tuple(meta for meta in layout.tensors if meta.name in kept),
            segments=tuple(segment for segment in layout.segments if segment.tensor in kept),
            tied=tuple(pair for pair in layout.tied if pair[1] in kept),
        )

    def _named(self, layout: RankLayout) -> RankLayout:
        if self._names is None:
            return layout
        return dataclasses.replace(
            layout,
            tensors=tuple(dataclasses.replace(m, name=self._name(m.name)) for m in layout.tensors),
            segments=tuple(dataclasses.replace(s, tensor=self._name(s.tensor)) for s in layout.segments),
            tied=tuple((self._name(alias), self._name(canonical)) for alias, canonical in layout.tied),
        )

    def _name(self, name: str) -> str:
        if isinstance(self._names, Mapping):
            found = max((each for each in self._names if name.startswith(each)), key=len, default=None)
            return name if found is None else self._names[found] + name[len(found) :]
        return self._names(name) if self._names else name

    def _check_distinct(self, given: Sequence[str]) -> None:
        owner: dict[str, str] = {}
        for name in given:
            made = self._name(name)
            if owner.setdefault(made, name) != name:
                remedy = f"{owner[made]} gets this name, too: give each tensor a name of its own"
                raise ConfigError(f"names: {name}", made, remedy)

    def _excludes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._exclude)
