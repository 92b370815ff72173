"""Actors that make a WeightSync over themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray

from tests.fleets.actors import Engine, Trainer
from tests.patience import patient
from weightsync import ConfigError, SyncConfig, WeightSync


def update(trainer: Any, engines: Mapping[str, Any]) -> tuple[str, float]:
    """Return what connecting and updating came to, and the seconds that it took."""
    began = time.monotonic()
    with WeightSync(SyncConfig(bucket_bytes=4096, connect_timeout_s=patient(30))) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        try:
            sync.connect()
            said = str(sync.update_weights().engines)
        except ConfigError as error:
            said = str(error)
    return said, time.monotonic() - began


def own_handle() -> Any:
    return ray.get_runtime_context().current_actor


class DrivingTrainer(Trainer):
    def drive(self, engine: Any) -> tuple[str, float]:
        return update(own_handle(), {"e0": engine})


class DrivingEngine(Engine):
    async def drive(self, trainer: Any) -> tuple[str, float]:
        return update(trainer, {"e0": own_handle()})

    async def drive_in_a_thread(self, trainer: Any) -> tuple[str, float]:
        return await asyncio.to_thread(update, trainer, {"e0": own_handle()})
