"""The joined declarations of the ranks of one side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigError, PlanError, nearest
from weightsync.plan.layout.layout_table import LayoutTable, content, unpack_names
from weightsync.plan.layout.segment import RankLayout, Stage, TensorMeta, suggest

Numbers: TypeAlias = npt.NDArray[np.int32]
Declarations: TypeAlias = Mapping[int, RankLayout]
"""Layouts without segments, buffers and padding, by the first rank that declares them."""


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """Tensors, ties and buffers of all ranks. Ranks with equal declarations are decoded once.

    Attributes:
        tensors: all tensors by name, in order of first appearance, without aliases.
        tied: (alias, canonical) pairs.
        frozen: names of tensors that do not change.
        names: all names that any rank uses.
        numbers: for each rank, the numbers in `names` of the rank's own names.
        buffers: (rank, live parameter) of all ranks.
        padding: (rank, buffer, byte offset, nbytes) of all ranks.
    """

    tensors: Mapping[str, TensorMeta]
    tied: tuple[tuple[str, str], ...]
    frozen: frozenset[str]
    names: Sequence[str]
    numbers: Sequence[Numbers]
    buffers: tuple[tuple[int, TensorMeta], ...]
    padding: tuple[tuple[int, str, int, int], ...]

    @classmethod
    def of(cls, tables: Sequence[LayoutTable]) -> Declared:
        """Join the declarations of the ranks of one side.

        Raises:
            ConfigError: a setting fits no name of any rank.
            PlanError: the ranks disagree on a tensor, or two stages hold one.
        """
        names = {packed: unpack_names(packed) for packed in dict.fromkeys(each.names for each in tables)}
        known: dict[str, int] = {}
        numbers = {
            packed: np.array([known.setdefault(name, len(known)) for name in its], np.int32)
            for packed, its in names.items()
        }
        ranks = _distinct(tables, names)
        tied = _join_tied(ranks)
        tensors = _join_tensors(ranks, dict(tied))
        check_stages(ranks)
        return cls(
            tensors,
            tied,
            _join_frozen(ranks),
            [*known],
            [numbers[each.names] for each in tables],
            _join_buffers(tables, names),
            tuple((rank, *row) for rank, each in enumerate(tables) for row in each.padded(names[each.names])),
        )


def _distinct(tables: Sequence[LayoutTable], names: Mapping[bytes, Sequence[str]]) -> Declarations:
    objects: set[tuple[object, ...]] = set()
    seen: set[object] = set()
    distinct: dict[int, RankLayout] = {}
    for rank, each in enumerate(tables):
        parts = each.names, each.tensors, each.tied, each.frozen
        same = (each.stage, *map(id, parts))  # ranks of one mesh have the same objects
        if same in objects:
            continue
        objects.add(same)
        key = each.names, each.stage, content(each.tensors), content(each.tied), content(each.frozen)
        if key not in seen:
            seen.add(key)
            its = names[each.names]
            tensors, tied, frozen = each.tensors.metas(its), each.tied_names(its), each.frozen_names(its)
            distinct[rank] = RankLayout(tensors, (), tied, stage=each.stage, frozen=frozen)
    return distinct


def _join_buffers(
    tables: Sequence[LayoutTable], names: Mapping[bytes, Sequence[str]]
) -> tuple[tuple[int, TensorMeta], ...]:
    metas: dict[object, tuple[TensorMeta, ...]] = {}
    joined: list[tuple[int, TensorMeta]] = []
    for rank, each in enumerate(tables):
        key = each.names, content(each.buffers)
        if key not in metas:
            metas[key] = each.buffers.metas(names[each.names])
        joined += [(rank, meta) for meta in metas[key]]
    return tuple(joined)


def _join_tied(ranks: Declarations) -> tuple[tuple[str, str], ...]:
    joined: dict[str, str] = {}
    for alias, canonical in (pair for layout in ranks.values() for pair in layout.tied):
        if joined.setdefault(alias, canonical) != canonical:
            raise PlanError(alias, f"tied to {joined[alias]} and to {canonical}; ranks must agree on one")
    for alias, canonical in joined.items():
        if canonical in joined:
            raise PlanError(alias, f"tied to {canonical}, itself an alias; tie to {joined[canonical]}")
    return tuple(sorted(joined.items()))


def _join_frozen(ranks: Declarations) -> frozenset[str]:
    joined = frozenset(name for layout in ranks.values() for name in layout.frozen)
    for rank, layout in ranks.items() if joined else ():
        left = joined.difference(layout.frozen)
        for meta in layout.tensors:
            if meta.name in left:
                raise PlanError(
                    meta.name, f"frozen, but not on rank {rank}; give every rank the same frozen patterns"
                )
    return joined


def _join_tensors(ranks: Declarations, tied: dict[str, str]) -> dict[str, TensorMeta]:
    """Return all ranks' tensors by name, in order of first appearance, without aliases."""
    metas: dict[str, TensorMeta] = {}
    owner: dict[str, int] = {}
    for rank, layout in ranks.items():
        for meta in layout.tensors:
            known = metas.setdefault(meta.name, meta)
            if known is meta:
                owner[meta.name] = rank
            elif known != meta:
                raise PlanError(
                    meta.name,
                    f"rank {owner[meta.name]} says {known.dtype} {known.shape}, "
                    f"rank {rank} says {meta.dtype} {meta.shape}; all must declare the global tensor",
                )
    for alias, canonical in tied.items():
        if canonical not in metas:
            raise PlanError(
                alias, f"tied to {canonical}, which no rank declares; {suggest(canonical, metas)}"
            )
        meta = metas.pop(alias, metas[canonical])
        if meta.shape != metas[canonical].shape:
            raise PlanError(
                alias, f"shape {meta.shape}, but tied to {canonical} of shape {metas[canonical].shape}"
            )
    return metas


def check_stages(ranks: Mapping[int, RankLayout]) -> None:
    """Check the stages of all ranks of one side. Ranks without a stage are skipped.

    `ranks` may leave out ranks that say the same as an earlier one.

    Raises:
        ConfigError: a setting fits no name of any rank.
        PlanError: two stages hold a tensor that they do not share.
    """
    stages = [(rank, layout, layout.stage) for rank, layout in ranks.items() if layout.stage]
    if stages and len(stages) == len(ranks):
        _check_settings([stage for _, _, stage in stages])
    owners: dict[str, tuple[int, int]] = {}
    for rank, layout, stage in stages:
        for name in _own(layout, stage):
            owner, number = owners.setdefault(name, (rank, stage.number))
            if number != stage.number:
                raise PlanError(
                    name,
                    f"rank {owner} of pipeline stage {number} and rank {rank} of stage {stage.number} both "
                    "hold it; give each stage layers of its own: look at the layers' layer_number, and at "
                    "what each rank was given as its pipeline rank and vp_stage",
                )


def _own(layout: RankLayout, stage: Stage) -> Iterator[str]:
    return (meta.name for meta in layout.tensors if meta.name not in stage.shared)


def _check_settings(stages: Iterable[Stage]) -> None:
    """Raise for the first setting that all stages say fits none of their names."""
    first, *others = ({(each.setting, each.value): each.near for each in stage.unmatched} for stage in stages)
    for (setting, value), near in first.items():
        if all((setting, value) in other for other in others):
            known = {*near}.union(*(other[setting, value] for other in others))
            raise ConfigError(setting, value, f"it matches no name of any rank; {nearest(value, known)}")
