"""Decides which trainer ranks push their weights from host memory, so that no copy of these is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.plan import Layout, same_dtype_tensors
from weightsync.plan.layout_table import LayoutTable


async def find_pushing(
    fleet: Fleet,
    config: SyncConfig,
    trainers: Sequence[LayoutTable],
    engines: Mapping[str, Sequence[LayoutTable]],
    source: Layout,
    joined: Mapping[str, Layout],
) -> frozenset[int]:
    """Return the trainer ranks whose holders ask them for their weights, a bucket at a time.

    There are none without ``sync.host_weights: push``. All others with weights on the host publish them to a send buffer. It is a copy of a version, from which
    engines heal, and by which weights can be staged. Without it, copies of the engines' memory have to do.
    So ranks push only if holders keep no copies, or if they map the memory of every engine. If a tensor needs
    a cast, the send buffer is the faster way, since it is page-locked.

    Args:
        trainers, engines: the layouts of their ranks.
        source, joined: the trainers' layout, and that of each engine.
    """
    on_host = [rank for rank, layout in enumerate(trainers) if not layout.device]
    if config.host_weights != "push" or config.stage != "none" or not on_host:
        return frozenset()
    if same_dtype_tensors(source, *next(iter(joined.items())))[1]:
        return frozenset()
    if config.keep_versions > 1 and not await _map_all(fleet, config, engines):
        return frozenset()
    calls = {f"trainer {rank}": fleet.trainers[rank][0].can_push() for rank in on_host}
    answers = (await gather_named(calls, "trial", config.connect_timeout_s)).require()
    return frozenset(rank for rank in on_host if answers[f"trainer {rank}"])


async def _map_all(fleet: Fleet, config: SyncConfig, engines: Mapping[str, Sequence[LayoutTable]]) -> bool:
    """Whether holders map the memory of every engine."""
    if not all(rank.device and rank.buffers for ranks in engines.values() for rank in ranks):
        return False
    calls = {f"engine {name}": fleet.engines[name].peer.can_export() for name in engines}
    answers = (await gather_named(calls, "trial", config.connect_timeout_s)).require()
    return all(all(ranks) for ranks in answers.values())
