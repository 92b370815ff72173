"""A checkpoint manager for verl. Rollouts read the trainers' shards, by `WeightSync`. See docs/verl.md."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ray.actor import ActorHandle
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from weightsync.actors.weight_sync import WeightSync
from weightsync.config import SyncConfig
from weightsync.errors import ConfigError, EngineError

_Servers = Mapping[str, ActorHandle[Any]]


class Manager(CheckpointEngineManager):  # type: ignore[misc]  # verl has no types
    """Moves weights from verl's training workers into the vLLM of each replica."""

    _connected: _Servers | None = None

    @cached_property
    def sync(self) -> WeightSync:
        """The WeightSync, with the configuration ``checkpoint_engine.engine_kwargs.sync``."""
        sync = WeightSync(SyncConfig.from_dict(self.config.engine_kwargs.get("sync", {})))
        sync.register_trainers(self.actor_wg.workers, model=model_of)
        return sync

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int = 0) -> dict[str, float]:
        """Update all replicas, verified. Returns metrics. Version N + 1 has the weights of step N.

        Raises:
            ConfigError: a replica shares GPUs with the trainers, or is on several hosts.
            WeightSyncError: a replica did not take the version. All replicas stay paused.
        """
        servers = {f"replica {each.replica_rank}": server_of(each) for each in self.replicas}
        await self.abort_replicas()
        metrics = await asyncio.to_thread(self._move, servers, global_steps)
        await asyncio.gather(*(each.clear_kv_cache() for each in self.replicas))
        await asyncio.gather(*(each.set_global_steps.remote(global_steps) for each in servers.values()))
        await self.resume_generation_replicas()
        return metrics

    def _move(self, servers: _Servers, step: int) -> dict[str, float]:
        if servers != self._connected:
            self._connected = None
            self.sync.register_engines(servers, llm="engine")
            self.sync.connect()
            self._connected = servers
        report = self.sync.update_weights(max(self.sync.version, step) + 1)
        for name in servers:  # also one that was left out, since it was lost before
            if report.engines.get(name) != report.version:
                state = report.states.get(name, "not connected")
                raise EngineError(name, "update", report.failures.get(name) or f"it is {state}")
        return report.metrics()


def server_of(replica: RolloutReplica) -> ActorHandle[Any]:
    """Return the actor that has a replica's engine.

    Raises ConfigError if the replica shares GPUs with the trainers, or is on several hosts.
    """
    if replica.rollout_mode != RolloutMode.STANDALONE:
        mode = replica.rollout_mode.value
        raise ConfigError("rollout_mode", mode, "use a trainer whose rollouts have GPUs of their own")
    if len(replica.servers) > 1:
        raise ConfigError("servers", len(replica.servers), "give each replica the GPUs of one host")
    server: ActorHandle[Any] = replica.servers[0]
    return server


def model_of(worker: Any) -> Any:  # noqa: ANN401 - verl's
    """Return the model that a worker trains. An actor of verl may have workers of several roles."""
    workers = getattr(worker, "worker_dict", {"": worker}).values()
    (model,) = (each.actor.engine.module for each in workers if getattr(each, "actor", None))
    return model
