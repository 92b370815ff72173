"""Moves a model's new weights from the processes that train it to the engines that serve it.

    from weightsync import SyncConfig, WeightSync

    sync = WeightSync(SyncConfig(timeout_s=60))
    sync.register_trainers(trainer_handles)
    sync.register_engines({"e0": handle})
    sync.connect()
    report = sync.update_weights(version=7)

The names below are public; all others may change. Each is loaded on first use, so that importing this
package loads neither Ray nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.actors.engine import EngineActor
    from weightsync.actors.servers.trainer import JoinedTrainer, join
    from weightsync.actors.servers.vllm import JoinDriver
    from weightsync.actors.trainer_shard import TrainerShard
    from weightsync.actors.vllm_actor import VllmActor
    from weightsync.actors.weight_sync import WeightSync
    from weightsync.collectives.shuffle import Shuffle, gather_send, scatter_recv
    from weightsync.config import SyncConfig, TlsFiles, parse_size
    from weightsync.driver.connecting.traffic import efficiency
    from weightsync.engines.vllm.worker import WeightSyncWorker
    from weightsync.errors import (
        ConfigError,
        DeadlineError,
        EngineError,
        PeerLostError,
        PlanError,
        ReplicasDifferError,
        StateError,
        VerifyError,
        WeightSyncError,
    )
    from weightsync.plan import Box, Layout, Plan, Segment, make_plan
    from weightsync.plan.cross_host.shuffle import ShufflePlan
    from weightsync.plan.figures.estimate import LinkRates
    from weightsync.report import SyncReport
    from weightsync.sources.selection import Part

__version__ = "0.1.0"

__all__ = [
    "Box",
    "ConfigError",
    "DeadlineError",
    "EngineActor",
    "EngineError",
    "JoinDriver",
    "JoinedTrainer",
    "Layout",
    "LinkRates",
    "Part",
    "PeerLostError",
    "Plan",
    "PlanError",
    "ReplicasDifferError",
    "Segment",
    "Shuffle",
    "ShufflePlan",
    "StateError",
    "SyncConfig",
    "SyncReport",
    "TlsFiles",
    "TrainerShard",
    "VerifyError",
    "VllmActor",
    "WeightSync",
    "WeightSyncError",
    "WeightSyncWorker",
    "__version__",
    "efficiency",
    "gather_send",
    "join",
    "make_plan",
    "parse_size",
    "scatter_recv",
]

_HOMES = {
    "Box": "weightsync.plan",
    "ConfigError": "weightsync.errors",
    "DeadlineError": "weightsync.errors",
    "EngineActor": "weightsync.actors.engine",
    "EngineError": "weightsync.errors",
    "JoinDriver": "weightsync.actors.servers.vllm",
    "JoinedTrainer": "weightsync.actors.servers.trainer",
    "Layout": "weightsync.plan",
    "LinkRates": "weightsync.plan.figures.estimate",
    "Part": "weightsync.sources.selection",
    "PeerLostError": "weightsync.errors",
    "Plan": "weightsync.plan",
    "PlanError": "weightsync.errors",
    "ReplicasDifferError": "weightsync.errors",
    "Segment": "weightsync.plan",
    "Shuffle": "weightsync.collectives.shuffle",
    "ShufflePlan": "weightsync.plan.cross_host.shuffle",
    "StateError": "weightsync.errors",
    "SyncConfig": "weightsync.config",
    "SyncReport": "weightsync.report",
    "TlsFiles": "weightsync.config",
    "TrainerShard": "weightsync.actors.trainer_shard",
    "VerifyError": "weightsync.errors",
    "VllmActor": "weightsync.actors.vllm_actor",
    "WeightSync": "weightsync.actors.weight_sync",
    "WeightSyncError": "weightsync.errors",
    "WeightSyncWorker": "weightsync.engines.vllm.worker",
    "efficiency": "weightsync.driver.connecting.traffic",
    "gather_send": "weightsync.collectives.shuffle",
    "join": "weightsync.actors.servers.trainer",
    "make_plan": "weightsync.plan",
    "parse_size": "weightsync.config",
    "scatter_recv": "weightsync.collectives.shuffle",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
