"""Has holders map the memory that trainers and engine ranks export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from weightsync.driver.connecting.layouts import Layouts
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import LiveMemory, RankMemory
from weightsync.protocol.peers import SharedLayout

Exports: TypeAlias = Sequence[RankMemory | None]
"""The exported memory of each rank, None if no holder accesses the memory."""
Served: TypeAlias = Sequence[RankMemory | LiveMemory | None]
"""The same of an engine's ranks. `LiveMemory` holds no tensors of the plan."""


async def link_all(
    fleet: Fleet, layouts: Layouts, exports: Exports, served: Mapping[str, Served], timeout_s: float
) -> None:
    """Have holders map the exports of their trainer ranks and engine ranks.

    `exports` are the trainers' exports, `served` are the engines' exports. Raises the errors of
    `gather_named`, and TransportError.
    """
    shared = _SharedLayouts(fleet)
    read = {
        holder: (export, shared.of(layout))
        for (_, holder), layout, export in zip(fleet.trainers, layouts.trainers, exports, strict=True)
        if export
    }
    written = {
        holder: (memory, shared.of(layout))
        for name, ranks in served.items()
        for holder, layout, memory in zip(
            fleet.engines[name].holders, layouts.engines[name], ranks, strict=True
        )
        if memory
    }
    links = {}
    for holder in sorted(read.keys() | written.keys()):
        engine, engine_layout = written.get(holder, (None, None))
        trainer, trainer_layout = read.get(holder, (None, None))
        call = fleet.holders[holder].link(engine, trainer, engine_layout, trainer_layout)
        links[f"holder {holder}"] = call
    (await gather_named(links, "attach", timeout_s)).require()


async def link_engine(
    fleet: Fleet, holders: Sequence[int], layouts: Sequence[LayoutTable], ranks: Served, timeout_s: float
) -> None:
    """Have `holders` map only the exports of their engine's ranks.

    `layouts` are the layouts of these ranks.
    """
    shared = _SharedLayouts(fleet)
    links = {
        f"holder {holder}": fleet.holders[holder].link(memory, None, shared.of(layout) if memory else None)
        for holder, layout, memory in zip(holders, layouts, ranks, strict=True)
    }
    (await gather_named(links, "link", timeout_s)).require()


async def unlink_engine(fleet: Fleet, name: str, timeout_s: float) -> None:
    """Have holders unmap a dead engine's exports, since mapped GPU memory is not freed.

    Holders that serve another engine by now, or do not answer, are skipped.
    """
    taken = {holder for other, its in fleet.live().items() if other != name for holder in its.holders}
    left = [holder for holder in fleet.engines[name].holders if holder not in taken]
    calls = {f"holder {holder}": fleet.holders[holder].link(None) for holder in left}
    await gather_named(calls, "unlink", timeout_s)


class _SharedLayouts:
    """Shares each layout with holders once: ranks of one mesh have equal layouts."""

    def __init__(self, fleet: Fleet) -> None:
        self._share = fleet.share
        self._known: dict[tuple[int, ...], SharedLayout] = {}

    def of(self, layout: LayoutTable) -> SharedLayout:
        """Return the layout, or another rank's layout from which it follows."""
        key = tuple(map(id, layout.of_all()))
        if key not in self._known:
            self._known[key] = SharedLayout(self._share(layout))
        return self._known[key]
