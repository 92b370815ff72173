"""What tests of engines as sources have in common: real holders, and doubles of mapped memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.hosts_fleet import Hosts
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.holder import Holder

CONFIG = SyncConfig(
    bucket_bytes=4096,
    timeout_s=patient(15),
    connect_timeout_s=patient(20),
    keep_versions=1,
    refill="zeromq",
)
THREE = {"e0": "b", "e1": "c", "e2": "d"}
"""Three engines, each on a host of its own. Their holders are numbers 1, 2 and 3."""


async def commit(loop: Hosts, version: int = 1) -> None:
    if version == 1:
        await loop.controller.connect()
    await loop.update(version)
    await loop.controller.snapshot_index.settled()


async def lose(loop: Hosts, name: str) -> None:
    """Start another process in the place of engine `name`: it holds nothing of the version."""
    loop.respawn(name)
    await loop.controller.adopt(name)
    assert loop.wrong(name)


def flat(holder: Holder) -> FlatSnapshot:
    assert holder.staging
    assert holder.staging.mapped
    found = holder.staging.mapped.flat
    assert found
    return found


def when_filled(holder: Holder, act: Callable[[], None], piece: int = 1) -> None:
    """Call `act` once, before `holder` writes piece number `piece` to its engine rank."""
    memory, pieces = flat(holder), iter(range(1 << 20))
    load = memory.load

    def acting(held: torch.Tensor, first: int) -> None:
        if next(pieces) == piece:
            act()
        load(held, first)

    memory.load = acting  # type: ignore[method-assign]
