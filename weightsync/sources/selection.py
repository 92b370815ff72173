"""Selects and renames the tensors of a rank that travel."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weightsync.errors import ConfigError, nearest
from weightsync.plan import Box, RankLayout, Segment, Stage, TensorMeta, Unmatched
from weightsync.plan.layout.segment import most_alike
from weightsync.plan.wrappers import unwrapped


@dataclass(frozen=True, slots=True)
class Part:
    """A trainer's tensor that is a part of a checkpoint's, or has its dimensions in another order::

        Part("model.layers.0.mlp.experts.gate_up_proj", (8, 1536, 2048), offset=(0, 768, 0))

    says of a tensor [8, 768, 2048] that it is the second half of the rows of each expert.

    Attributes:
        tensor: the checkpoint's tensor.
        shape: its shape.
        offset: where the part starts in it, by default at its first element.
        order: the trainer's dimension for each of the checkpoint's; ``(0, 2, 1)`` swaps the last two.
    """

    tensor: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def meta(self, meta: TensorMeta) -> TensorMeta:
        """Return the checkpoint's tensor. Raises ConfigError if `meta`, the trainer's, does not fit."""
        ndim = len(meta.shape)
        order, offset = self._order(ndim), self._offset(ndim)
        if sorted(order) != list(range(ndim)) or len(self.shape) != ndim or len(offset) != ndim:
            remedy = f"{meta.name} has {ndim} dimensions: give shape, offset and order as many"
            raise ConfigError(f"names: {meta.name}", self, remedy)
        ends = [start + meta.shape[dim] for start, dim in zip(offset, order, strict=True)]
        if min(offset, default=0) < 0 or any(end > size for end, size in zip(ends, self.shape, strict=True)):
            raise ConfigError(f"names: {meta.name}", self, f"its shape {meta.shape} reaches out of it")
        return TensorMeta(self.tensor, meta.dtype, self.shape)

    def segment(self, segment: Segment) -> Segment:
        """Return a segment of the trainer's tensor as one of the checkpoint's."""
        ndim = segment.box.ndim
        order = self._order(ndim)
        offset = tuple(
            segment.box.offset[dim] + start for dim, start in zip(order, self._offset(ndim), strict=True)
        )
        return dataclasses.replace(
            segment,
            tensor=self.tensor,
            box=Box(offset, tuple(segment.box.extent[dim] for dim in order)),
            strides=tuple(segment.strides[dim] for dim in order),
        )

    def _order(self, ndim: int) -> tuple[int, ...]:
        return self.order or tuple(range(ndim))

    def _offset(self, ndim: int) -> tuple[int, ...]:
        return self.offset or (0,) * ndim


Names = Mapping[str, str] | Callable[[str], str | Part]
"""How a trainer's names become a checkpoint's: a prefix for each prefix, or a function of one name."""


@dataclass(frozen=True, slots=True)
class _Named:
    """A layout in a checkpoint's names.

    Attributes:
        wrapped: for each name that lost wrappers, the name with the wrappers.
    """

    layout: RankLayout
    wrapped: Mapping[str, str]

    @classmethod
    def of(cls, layout: RankLayout) -> _Named:
        """Remove wrappers from names, unless two tensors would get one name. Old names become aliases."""
        names = [*(meta.name for meta in layout.tensors), *(alias for alias, _ in layout.tied)]
        bare = {name: unwrapped(name) for name in names}
        counts = Counter(bare.values())
        new = {name: each for name, each in bare.items() if each != name and counts[each] == 1}
        if not new:
            return cls(layout, {})
        canonical, layout = dict(layout.tied), layout.renamed(new)
        aliases = [(name, canonical.get(name, name)) for name in new]
        tied = (*layout.tied, *((alias, new.get(name, name)) for alias, name in aliases))
        return cls(dataclasses.replace(layout, tied=tied), {each: name for name, each in new.items()})

    def fits(self, name: str, patterns: Collection[str]) -> bool:
        """Return True if a tensor's name fits a pattern, with or without the names of wrappers."""
        names = (name, self.wrapped.get(name, name))
        return any(fnmatchcase(each, pattern) for pattern in patterns for each in names)


class Selection:
    """Renames a layout's tensors, removes wrappers from names, and leaves tensors out."""

    def __init__(
        self, exclude: Collection[str] = (), names: Names | None = None, frozen: Collection[str] = ()
    ) -> None:
        """
        Args:
            exclude: patterns of names that are left out, as of `fnmatch`: ``value_head.*``.
            names: what comes before: see `Names`. Of several prefixes of a name the longest counts.
            frozen: patterns of names that do not change after the first update.
        """
        self._exclude, self._names, self._frozen = tuple(exclude), names, tuple(frozen)

    def check(self, layout: RankLayout, excluded: Collection[str] = ()) -> tuple[Unmatched, ...]:
        """Check the selection against a rank's tensors, and return what matches none of them.

        A rank that knows a part of the model alone, of which ``layout.stage`` tells, can do no more. Patterns
        in `excluded` have left tensors out before.

        Raises ConfigError if two tensors get one name, or if something is unmatched and the rank knows all.
        """
        given = [meta.name for meta in layout.tensors] + [alias for alias, _ in layout.tied]
        self._check_distinct(given)
        unmatched = (*self._unmatched_prefixes(given), *self._unmatched_patterns(layout, excluded))
        if unmatched and not layout.stage:
            first = unmatched[0]
            raise ConfigError(first.setting, first.value, nearest(first.value, first.near))
        return unmatched

    def _unmatched_prefixes(self, given: Sequence[str]) -> Iterator[Unmatched]:
        for prefix in self._names if isinstance(self._names, Mapping) else ():
            if not any(name.startswith(prefix) for name in given):
                yield Unmatched("names", prefix, most_alike(prefix, given))

    def _unmatched_patterns(self, layout: RankLayout, excluded: Collection[str]) -> Iterator[Unmatched]:
        patterns = [("exclude", each) for each in self._exclude if each not in excluded]
        patterns += [("frozen", each) for each in self._frozen]
        if not patterns:
            return
        named = _Named.of(self._renamed(layout))
        names = [meta.name for meta in named.layout.tensors]
        for setting, pattern in patterns:
            if not any(named.fits(name, (pattern,)) for name in names):
                yield Unmatched(setting, pattern, most_alike(pattern, names))

    def of(self, layout: RankLayout) -> RankLayout:
        """Return `layout` with a checkpoint's names and frozen tensors, without excluded tensors."""
        named = _Named.of(self._renamed(layout))
        still = set(named.layout.frozen)
        names = [meta.name for meta in named.layout.tensors]
        frozen = tuple(name for name in names if name in still or named.fits(name, self._frozen))
        layout = dataclasses.replace(named.layout, frozen=frozen)
        if not self._exclude:
            return layout
        kept = {meta.name for meta in layout.tensors if not named.fits(meta.name, self._exclude)}
        return dataclasses.replace(
            layout,
            tensors=tuple(meta for meta in layout.tensors if meta.name in kept),
            segments=tuple(segment for segment in layout.segments if segment.tensor in kept),
            tied=tuple(pair for pair in layout.tied if pair[1] in kept),
            frozen=tuple(name for name in frozen if name in kept),
        )

    def _renamed(self, layout: RankLayout) -> RankLayout:
        if self._names is None:
            return layout
        parts = {meta.name: self._part(meta) for meta in layout.tensors}
        metas = {made.name: made for made in (parts[meta.name].meta(meta) for meta in layout.tensors)}
        return dataclasses.replace(
            layout,
            tensors=tuple(metas.values()),
            segments=tuple(parts[segment.tensor].segment(segment) for segment in layout.segments),
            tied=tuple((self._tied_name(alias), self._tied_name(name)) for alias, name in layout.tied),
            stage=layout.stage and self._stage(layout.stage),
        )

    def _stage(self, stage: Stage) -> Stage:
        made = map(self._name, stage.shared)
        shared = tuple(each.tensor if isinstance(each, Part) else each for each in made)
        return dataclasses.replace(stage, shared=shared)

    def _part(self, meta: TensorMeta) -> Part:
        found = self._name(meta.name)
        return found if isinstance(found, Part) else Part(found, meta.shape)

    def _tied_name(self, name: str) -> str:
        found = self._name(name)
        if isinstance(found, Part):
            raise ConfigError(f"names: {name}", found, "it is tied: give a name alone")
        return found

    def _name(self, name: str) -> str | Part:
        if isinstance(self._names, Mapping):
            found = max((each for each in self._names if name.startswith(each)), key=len, default=None)
            return name if found is None else self._names[found] + name[len(found) :]
        return self._names(name) if self._names else name

    def _check_distinct(self, given: Sequence[str]) -> None:
        owner: dict[str | Part, str] = {}
        for name in given:
            made = self._name(name)
            if owner.setdefault(made, name) != name:
                remedy = f"{owner[made]} gets this name, too: give each tensor a name of its own"
                raise ConfigError(f"names: {name}", made, remedy)
