"""Which ranks hold the same boxes of a tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from weightsync.plan.broadcast.plan import Plan
from weightsync.plan.layout.column import Column, Positions, number_rows
from weightsync.plan.layout.draft import in_model
from weightsync.plan.layout.layout_table import LayoutTable, SegmentTable, unpack_names


def held_boxes(plan: Plan, layouts: Sequence[LayoutTable]) -> Positions:
    """Number the ranks' boxes of each tensor: int64[num_ranks, num_tensors].

    Ranks that hold the same boxes of a tensor have the same number there; -1 means no boxes. Other copies of
    experts count as other boxes: `Arrangement`. A tensor is found under the names of `by_tensor`.
    """
    taken = {*(meta.name for meta in plan.tensors), *dict(plan.tied)}
    held_parts = [layout.held() for layout in layouts]
    filled = [_filled(part) for part in held_parts]
    parts = [part.take(rows) for part, rows in zip(held_parts, filled, strict=True)]
    copies = np.concatenate([_copies(*each) for each in zip(layouts, filled, strict=True)])
    names = [unpack_names(layout.names) for layout in layouts]
    starts = np.cumsum([0, *map(len, names)])
    owner = np.concatenate([part.tensor + start for part, start in zip(parts, starts[:-1], strict=True)])
    sets = _number_sets(owner, number_rows([*_boxes(parts), copies]), int(starts[-1]))
    held = np.full((len(layouts), len(plan.tensors)), -1, np.int64)
    for rank, layout in enumerate(layouts):
        places = _places(plan, layout, names[rank], parts[rank].tensor, taken)
        held[rank, places >= 0] = sets[starts[rank] + places[places >= 0]]
    return held


def _filled(segments: SegmentTable) -> Positions:
    """Return the rows of segments with elements."""
    segment = np.repeat(np.arange(len(segments)), segments.ndim)
    is_filled = np.ones(len(segments), np.bool_)
    is_filled[segment[segments.extent == 0]] = False
    return np.flatnonzero(is_filled)


def _copies(layout: LayoutTable, rows: Positions) -> Positions:
    """Return the number of the expert's copy in each of these segments: int64[len(rows)]."""
    if not layout.arrangement or not layout.arrangement.copies:
        return np.zeros(len(rows), np.int64)
    copies: Positions = np.array(layout.arrangement.copies, np.int64)[rows, 0]
    return copies


def _boxes(parts: Sequence[SegmentTable]) -> list[Column]:
    """Return columns of all segments' boxes: the number of dimensions, then offsets and extents, or -1."""
    ndim, offset, extent = (
        np.concatenate([getattr(part, name).astype(np.int64) for part in parts])
        for name in ("ndim", "offset", "extent")
    )
    first, columns = np.cumsum(ndim) - ndim, [ndim]
    for dim in range(int(ndim.max(initial=0))):
        has = ndim > dim
        for numbers in (offset, extent):
            column = np.full(len(ndim), -1, np.int64)
            column[has] = numbers[first[has] + dim]
            columns.append(column)
    return columns


def _number_sets(owner: Positions, member: Positions, num_owners: int) -> Positions:
    """Return a number for the set of members of each owner, -1 for none: int64[num_owners]."""
    width = int(member.max(initial=0)) + 1
    owner, member = np.divmod(np.unique(owner * width + member), width)
    owners, first, count = np.unique(owner, return_index=True, return_counts=True)
    numbers = member[first]
    sets: dict[bytes, int] = {}
    for place in np.flatnonzero(count > 1).tolist():
        members = member[first[place] : first[place] + count[place]].tobytes()
        numbers[place] = sets.setdefault(members, width + len(sets))
    found = np.full(num_owners, -1, np.int64)
    found[owners] = numbers
    return found


def _places(
    plan: Plan, layout: LayoutTable, names: Sequence[str], filled: Column, taken: Collection[str]
) -> Positions:
    """Return the number of the name under which a rank holds each tensor of the plan, -1 for none.

    `filled` has the numbers of names with elements, and `taken` all names of the plan.
    """
    held = {names[number]: number for number in np.unique(filled).tolist()}
    places = np.array([held.get(meta.name, -1) for meta in plan.tensors], np.int64)
    canonical = dict(layout.tied_names(names))
    for tensor in np.flatnonzero(places < 0).tolist():
        name = plan.tensors[tensor].name
        others = (canonical.get(name, ""), in_model(name, taken))
        places[tensor] = next((held[other] for other in others if other in held), -1)
    return places
