"""Two engines on CPUs join a host at once. The model's bytes cross to that host once.

A holder of the host copies them from two other hosts, and both engines read its copy. The second time, the
holder of one of these hosts is killed in mid-copy.
"""

from __future__ import annotations

import os
from typing import Any

import ray

from tests.fleets.actors import Engine, Trainer, until
from tests.hosts.lost_links import checksum
from tests.hosts.outside import ask, put, say
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.holder.refill import STEP_NBYTES

WIDTH = 3072
SIZE = 4 * (WIDTH * WIDTH + WIDTH + 8 * WIDTH + 8)
MBIT_PER_S = 100
NEWCOMERS = ("e1", "e2")
CONFIG = SyncConfig(
    bucket_bytes=1 << 20,
    timeout_s=patient(5),
    connect_timeout_s=patient(30),
    heal_backoff_s=0.1,
    refill="zeromq",
)


class Summed(Engine):
    """Says what it holds in few bytes."""

    async def checksum(self) -> int:
        return checksum(self._engine.tensors)


def start(name: str) -> Any:
    """Start an engine: one on the second host, the newcomers on the third."""
    return put("east" if name in NEWCOMERS else "west", Summed, WIDTH, name, name)


def lose(sync: WeightSync) -> int:
    """Kill the newcomers; `respawn` starts them again. Returns the bytes that their host has received."""
    before = ask("nbytes", "east")
    for name in NEWCOMERS:
        ray.kill(sync.engines()[name])
    assert until(lambda: EngineState.SERVING not in [sync.engine_states()[n] for n in NEWCOMERS], patient(10))
    return before


def filled(sync: WeightSync, trainer: Any, num_heals: int) -> None:
    """Wait until both are filled, from a holder of their own host alone."""
    assert until(lambda: len(sync.heals) == num_heals, patient(60)), sync.engine_states()
    wanted = checksum(ray.get(trainer.weights.remote()))
    assert ray.get([sync.engines()[name].checksum.remote() for name in NEWCOMERS]) == [wanted] * 2
    heals = sync.heals[-2:]
    say(*(f"{heal.engine}: {dict(heal.bytes_from)}" for heal in heals), sep="; ")
    assert {name for heal in heals for name in heal.bytes_from} <= {"holder 2", "holder 3"}
    assert all(heal.verified and sum(heal.bytes_from.values()) >= SIZE for heal in heals)


def num_kept(holder: Any) -> int:
    """Return how many parts a holder keeps."""
    return len(holder.snapshots())


def host_copies() -> None:
    """Count what crosses, and kill a source while it is read."""
    with WeightSync(CONFIG) as sync:
        trainer = put("head", Trainer, WIDTH, "t")
        sync.register_trainers([trainer])
        sync.register_engines({name: start(name) for name in ("e0", *NEWCOMERS)}, respawn=start)
        sync.connect()
        assert sync.update_weights(1).verified
        for host in ("head", "west"):
            ask("sending_rate", host, MBIT_PER_S)

        before = lose(sync)
        filled(sync, trainer, 2)
        crossed = ask("nbytes", "east") - before
        say(f"two that join: model {SIZE} bytes, crossed {crossed}")
        assert abs(crossed - SIZE) < 0.05 * SIZE

        ray.get(trainer.train.remote(2))
        assert sync.update_weights(2).verified
        sync.settle(patient(20))
        holders = sync.holders()
        kept = ray.get([holder.__ray_call__.remote(num_kept) for holder in holders.values()])
        assert kept == [1, 1, 0, 0], "no copy of the version before is left"
        source = ray.get(holders["holder 1"].__ray_call__.remote(lambda _: os.getpid()))

        before = lose(sync)
        assert until(lambda: ask("nbytes", "east") - before >= SIZE / 2, patient(30))
        assert len(sync.heals) == 2, "it is over already"
        ask("kill", "west", source)
        filled(sync, trainer, 4)
        crossed = ask("nbytes", "east") - before
        say(f"one killed: crossed {crossed}")
        assert 0.95 * SIZE < crossed < 1.05 * SIZE + STEP_NBYTES / 2

        ray.get(trainer.train.remote(3))
        assert sync.update_weights(3).verified
