"""Decides which trainer ranks push their weights from host memory, so that no copy of these is published."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.plan import Layout, same_dtype_tensors
from weightsync.plan.layout.layout_table import LayoutTable

logger = logging.getLogger("weightsync.driver")


async def find_pushing(
    fleet: Fleet,
    config: SyncConfig,
    trainers: Sequence[LayoutTable],
    engines: Mapping[str, Sequence[LayoutTable]],
    source: Layout,
    joined: Mapping[str, Layout],
) -> frozenset[int]:
    """Return the trainer ranks that push weights to their holders, a bucket at a time.

    Without ``sync.host_weights: push`` no rank pushes. Other ranks with weights on the host publish them to a
    send buffer. This copy of a version heals engines, and lets weights be staged. Without send buffers,
    holders copy the engines' memory to heal engines. If a push is asked for but weights are copied, the log
    says why.

    Args:
        trainers, engines: the layouts of their ranks.
        source, joined: the trainers' joined layout, and each engine's joined layout.
    """
    on_host = [rank for rank, layout in enumerate(trainers) if not layout.device]
    if config.host_weights != "push" or not on_host:
        return frozenset()
    obstacle = ""
    if config.stage != "none":
        obstacle = f"sync.stage is {config.stage}"
    elif cast := same_dtype_tensors(source, *next(iter(joined.items())))[1]:
        obstacle = f"{min(cast)} has another dtype in the engines"
    elif config.keep_versions > 1 and not await _map_all(fleet, config, engines):
        obstacle = "holders do not map every engine's memory, and sync.keep_versions is 2"
    if obstacle:
        logger.warning("[driver] weights on the host are copied before they move: %s", obstacle)
        return frozenset()
    calls = {f"trainer {rank}": fleet.trainers[rank][0].can_push() for rank in on_host}
    answers = (await gather_named(calls, "trial", config.connect_timeout_s)).require()
    unable = [name for name, can in answers.items() if not can]
    if unable:
        logger.warning("[driver] weights of %s are copied: it sees no GPU, or offloads", ", ".join(unable))
    return frozenset(rank for rank in on_host if answers[f"trainer {rank}"])


async def _map_all(fleet: Fleet, config: SyncConfig, engines: Mapping[str, Sequence[LayoutTable]]) -> bool:
    """Return True if holders map the memory of every engine."""
    if not all(
        rank.device and rank.buffers and not rank.converts for ranks in engines.values() for rank in ranks
    ):
        return False
    calls = {f"engine {name}": fleet.engines[name].peer.can_export() for name in engines}
    answers = (await gather_named(calls, "trial", config.connect_timeout_s)).require()
    return all(all(ranks) for ranks in answers.values())
