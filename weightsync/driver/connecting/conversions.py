"""Describes how engines convert the tensors that they receive, and checks that engines can cast."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from weightsync.errors import PlanError
from weightsync.plan import Layout
from weightsync.plan.layout.conversion import casts, dtypes
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.plan.layout.match import match
from weightsync.plan.layout.segment import TensorMeta
from weightsync.protocol.messages import Attached


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


def _first_cast(engine: Layout, tensors: Sequence[TensorMeta]) -> tuple[TensorMeta, str] | None:
    """Return a tensor of an engine that travels in another dtype, and that dtype; None if there is none.

    `tensors`: all tensors that travel.
    """
    before = dtypes(tensors)
    pairs = ((meta, before.get(meta.name, meta.dtype)) for meta in engine.tensors)
    return next((pair for pair in pairs if pair[0].dtype != pair[1]), None)


def require_casts(
    tensors: Sequence[TensorMeta], joined: Mapping[str, Layout], reports: Mapping[str, Sequence[Attached]]
) -> None:
    """Raise PlanError if an engine has to cast one of `tensors`, which travel, and a rank does not cast."""
    cast = {engine: _first_cast(engine, tensors) for engine in set(joined.values())}
    for name, ranks in reports.items():
        if (found := cast[joined[name]]) and not all(rank.casts for rank in ranks):
            held, travels = found
            raise PlanError(
                held.name,
                f"engine {name} holds it as {held.dtype}, another engine does not, so it travels as "
                f"{travels}, and the adapter of engine {name} does not cast: start all engines with "
                "one dtype, give them to two WeightSyncs (add_model makes the second), or have the adapter "
                "give its layout to EngineFeed.open",
            )
