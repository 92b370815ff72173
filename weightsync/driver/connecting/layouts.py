"""Asks all ranks for their layouts, and joins them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weightsync.config import SyncConfig
from weightsync.driver.connecting.conversions import ranks_as_taken, travelling, with_casts
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.errors import StateError
from weightsync.plan import MAPPED, Layout
from weightsync.plan.layout.layout import join_tables
from weightsync.plan.layout.layout_table import LayoutTable, Outline, unpack_names
from weightsync.plan.layout.trainers_layout import TrainersLayout
from weightsync.protocol.collector import collector_paused


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of all ranks, also joined per side and engine.

    Attributes:
        trainers: the layout of each trainer rank.
        engines: the layouts of each engine's ranks, by the engine's name.
        source: the joined layout of all trainer ranks.
        joined: the joined layout of each engine's ranks. Equal engines share one layout.
        quantised: how each engine quantises tensors, without casts.
    """

    trainers: Sequence[LayoutTable]
    engines: Mapping[str, Sequence[LayoutTable]]
    source: TrainersLayout
    joined: Mapping[str, Layout]
    quantised: Mapping[str, str]

    @property
    def differ(self) -> bool:
        """Return True if the engines' joined layouts differ, so that engines may have to cast."""
        return len({*self.joined.values()}) > 1

    def casting(self) -> Layouts:
        """Return these layouts with the engines' casts added."""
        if not self.differ or not (tensors := travelling(self.source.stated, self.joined)):
            return self
        joined, engines = self.joined, self.engines
        return replace(self, engines={n: with_casts(its, joined[n], tensors) for n, its in engines.items()})


async def ask_layouts(fleet: Fleet, config: SyncConfig) -> Layouts:
    """Ask all ranks for their layouts, and join them. Raises as `connect`."""
    timeout_s = config.connect_timeout_s
    if not fleet.live():
        raise StateError("no engine is alive: call add_engine() first")
    trainers, engines = await asyncio.gather(_of_trainers(fleet, timeout_s), _of_engines(fleet, config))
    return _joined(engines, [_published(table, config) for table in trainers])


@collector_paused
def _joined(engines: Mapping[str, Sequence[LayoutTable]], sources: Sequence[LayoutTable]) -> Layouts:
    """Join the layouts of each side. Equal engines share one."""
    ranks = engines
    if any(len(rank.stored) for tables in engines.values() for rank in tables):
        names = {name for packed in {source.names for source in sources} for name in unpack_names(packed)}
        ranks = {name: ranks_as_taken(its, names) for name, its in engines.items()}
    joined: dict[str, Layout] = {}
    for name, its in ranks.items():
        twin = next((other for other in joined if are_alike(its, ranks[other])), None)
        joined[name] = joined[twin] if twin else join_tables(its)
    quantised = {name: its[0].converts for name, its in ranks.items()}
    return Layouts(sources, ranks, TrainersLayout(sources), joined, quantised)


async def _of_trainers(fleet: Fleet, timeout_s: float) -> Sequence[LayoutTable]:
    """Ask one rank per outline for a layout. The layouts of ranks with equal outlines follow."""
    peers = {f"trainer {i}": trainer for i, (trainer, _) in enumerate(fleet.trainers)}
    calls = {name: peer.outline() for name, peer in peers.items()}
    outlines = (await gather_named(calls, "layout", timeout_s)).require()
    asked = {outline.key: name for name, outline in reversed(outlines.items())}
    wanted = {name: peers[name].layout() for name in asked.values()}
    found = (await gather_named(wanted, "layout", timeout_s)).require()
    return [found[asked[each.key]].of_rank(each) for each in outlines.values()]


async def _of_engines(fleet: Fleet, config: SyncConfig) -> dict[str, Sequence[LayoutTable]]:
    """Ask one engine per outline for the layouts of all ranks."""
    timeout_s, components = config.connect_timeout_s, config.components
    peers = {f"engine {name}": member.peer for name, member in fleet.live().items()}
    calls = {name: peer.outline(components) for name, peer in peers.items()}
    outlines = (await gather_named(calls, "layout", timeout_s)).require()
    asked = {_keys(its): name for name, its in reversed(outlines.items())}
    wanted = {name: peers[name].layout(components) for name in asked.values()}
    found = (await gather_named(wanted, "layout", timeout_s)).require()
    tables = {name: found[asked[_keys(its)]] for name, its in outlines.items()}
    return {
        name.removeprefix("engine "): [*map(LayoutTable.of_rank, tables[name], its)]
        for name, its in outlines.items()
    }


def _keys(outlines: Sequence[Outline]) -> tuple[bytes, ...]:
    return tuple(each.key for each in outlines)


def _published(trainer: LayoutTable, config: SyncConfig) -> LayoutTable:
    """Return a trainer rank's layout. Staged tensors are published to the host."""
    on_device = trainer.device not in ("", MAPPED)
    return replace(trainer, device="") if on_device and config.stage != "none" else trainer


def are_alike(layouts: Sequence[LayoutTable], known: Sequence[LayoutTable]) -> bool:
    """Return True if two engines' layouts are equal, devices and conversions aside."""
    return len(layouts) == len(known) and all(map(LayoutTable.alike, layouts, known))
