"""Describes how engines convert the tensors that they receive, and checks that engines can cast."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from weightsync.errors import PlanError
from weightsync.plan import Layout, Plan
from weightsync.plan.layout.conversion import casts, conversion_of, dtypes
from weightsync.plan.layout.draft import DRAFT
from weightsync.plan.layout.layout_table import LayoutTable, unpack_names
from weightsync.plan.layout.match import match
from weightsync.plan.layout.segment import TensorMeta
from weightsync.protocol.messages import Attached


def as_taken(
    engines: Mapping[str, Sequence[LayoutTable]], trainers: Sequence[LayoutTable]
) -> dict[str, Sequence[LayoutTable]]:
    """Return the layouts of engines, of their own checkpoints' tensors where trainers have these."""
    names: set[str] = set()
    if any(len(rank.stored) for ranks in engines.values() for rank in ranks):
        for packed in {trainer.names for trainer in trainers}:
            names.update(unpack_names(packed))
    return {name: ranks_as_taken(ranks, names) for name, ranks in engines.items()}


def ranks_as_taken(ranks: Sequence[LayoutTable], names: Collection[str]) -> Sequence[LayoutTable]:
    """Return the layouts of an engine's ranks for tensors of these names. All ranks store the same."""
    return [rank.as_stored() for rank in ranks] if ranks[0].takes_stored(names) else ranks


def travelling(source: Layout, joined: Mapping[str, Layout]) -> Sequence[TensorMeta] | None:
    """Return the tensors as they travel if engines hold them in different dtypes, else None.

    Raises:
        PlanError: the layouts do not fit together.
    """
    held = [dtypes(engine.tensors) for engine in set(joined.values())]
    if all(each == held[0] for each in held):
        return None
    return match(source, sorted(joined.items())).tensors


def with_casts(
    ranks: Sequence[LayoutTable], engine: Layout, tensors: Sequence[TensorMeta]
) -> Sequence[LayoutTable]:
    """Return an engine's layouts with the casts of `tensors` added."""
    counts = casts(dtypes(tensors), engine.tensors)
    told = [f"{n} are cast from {before} to {after}" for (before, after), n in sorted(counts.items())]
    if not told:
        return ranks
    return [replace(each, converts=", ".join(filter(None, (each.converts, *told)))) for each in ranks]


def first_cast(engine: Layout, tensors: Sequence[TensorMeta]) -> tuple[TensorMeta, str] | None:
    """Return a tensor of an engine that travels in another dtype, and that dtype; None if there is none.

    `tensors` are those that travel.
    """
    before = dtypes(tensors)
    pairs = ((meta, before.get(meta.name, meta.dtype)) for meta in engine.tensors)
    return next((pair for pair in pairs if pair[0].dtype != pair[1]), None)


def require_casts(name: str, cast: tuple[TensorMeta, str] | None, reports: Sequence[Attached]) -> None:
    """Raise PlanError if engine `name` has to cast, as `first_cast` says, and one of its ranks does not."""
    if cast and not all(report.casts for report in reports):
        held, travels = cast
        raise PlanError(
            held.name,
            f"engine {name} holds it as {held.dtype}, another engine does not, so it travels as "
            f"{travels}, and the adapter of engine {name} does not cast: start all engines with "
            "one dtype, give them to two WeightSyncs (add_model makes the second), or have the adapter give "
            "its layout to EngineFeed.open",
        )


class Conversions:
    """The conversions of each engine and component, in words.

    Attributes:
        by_engine: by the engine's name, then by ``model`` or ``draft``.
    """

    def __init__(self, source: Layout, plan: Plan) -> None:
        """`source` is the trainers' layout."""
        self._source = source
        self._tensors = {
            component: [meta for meta in plan.tensors if meta.name.startswith(DRAFT) is is_draft]
            for component, is_draft in (("model", False), ("draft", True))
        }
        self._known: dict[tuple[Layout, str], Mapping[str, str]] = {}
        self.by_engine: dict[str, Mapping[str, str]] = {}

    def add(self, name: str, engine: Layout, converts: str) -> None:
        """Add an engine. `converts` is the layout's `converts`, without casts."""
        key = engine, converts
        if key not in self._known:
            self._known[key] = {
                component: conversion_of(self._source, tensors, engine, converts)
                for component, tensors in self._tensors.items()
            }
        self.by_engine[name] = self._known[key]

    def forget(self, engine: Layout) -> None:
        """Drop a layout that no engine has any more."""
        self._known = {key: known for key, known in self._known.items() if key[0] is not engine}
