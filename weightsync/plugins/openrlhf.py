"""OpenRLHF's ``train_ppo_ray``, with weights that `WeightSync` moves::

    import runpy

    import weightsync.plugins.openrlhf

    weightsync.plugins.openrlhf.install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")

For OpenRLHF 0.11.2. OpenRLHF's command line, actors and loop stay as they are.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import ppo_actor, vllm_engine

from weightsync.actors.weight_sync import WeightSync
from weightsync.config import SyncConfig
from weightsync.errors import ConfigError, StateError

_SCRIPT = "openrlhf.cli.train_ppo_ray"
_WORKER = "weightsync.WeightSyncWorker"


class Synced(ppo_trainer.BasePPOTrainer):  # type: ignore[misc]  # OpenRLHF is not followed
    """A trainer that updates engines by a `WeightSync`. OpenRLHF's class documents the method."""

    sync_config: SyncConfig
    weight_sync: WeightSync | None = None

    def __init__(self, strategy: Any, *others: object) -> None:  # noqa: ANN401 - OpenRLHF's
        ds = strategy.args.ds
        if ds.tensor_parallel_size > 1:
            remedy = "give 1: DeepSpeed does not say how AutoTP cuts parameters"
            raise ConfigError("ds.tensor_parallel_size", ds.tensor_parallel_size, remedy)
        if ds.load_in_4bit:
            raise ConfigError("ds.load_in_4bit", ds.load_in_4bit, "leave it out: engines read whole values")
        super().__init__(strategy, *others)

    def broadcast_to_vllm(self) -> None:
        if self.args.vllm.enable_sleep:  # caches sleep until OpenRLHF generates
            vllm_engine.batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        if self.weight_sync is None:
            self.weight_sync = self._connected()
        self.weight_sync.update_weights()

    def _connected(self) -> WeightSync:
        engines = {f"vllm-{index}": engine for index, engine in enumerate(self.vllm_engines)}
        sync = WeightSync(replace(self.sync_config, min_engines=len(engines)))  # OpenRLHF asks all of them
        options = {"merge": "default"} if self.args.ds.lora.rank else {}  # PEFT's name for it
        sync.register_trainers(self.actor_model_group._actor_handlers, model="actor.model", options=options)
        sync.register_engines(engines, llm="llm")
        sync.connect()
        return sync


def install(config: SyncConfig | None = None) -> None:
    """Replace actor classes of OpenRLHF in this process. Call it before ``train_ppo_ray`` is imported.

    Rollout actors start vLLM with our worker extension. Trainer ranks make no group with engines. The actor
    that has the loop makes a `WeightSync` with `config` before the first update. An update fails if an engine
    fails, as OpenRLHF generates with all engines.

    Raises StateError if ``train_ppo_ray`` was imported and has the classes of before.
    """
    if _SCRIPT in sys.modules:
        raise StateError(f"{_SCRIPT} was imported already: call install() before the import")

    # mypy does not follow OpenRLHF. Ray pickles these classes whole, so rollout actors import neither this
    # module nor DeepSpeed.
    class Rollout(_plain(vllm_engine.RolloutRayActor)):  # type: ignore[misc]
        async def __init__(self, **settings: object) -> None:  # type: ignore[misc]  # as OpenRLHF does
            await super().__init__(**settings | {"worker_extension_cls": _WORKER})

    class Policy(_plain(ppo_actor.PolicyModelActor)):  # type: ignore[misc]
        def init_model_from_pretrained(
            self, strategy: object, pretrain: str, max_steps: int, vllm_engines: object
        ) -> None:
            super().init_model_from_pretrained(strategy, pretrain, max_steps)

    class Trainer(_plain(ppo_trainer.PPOTrainer), Synced):  # type: ignore[misc]
        sync_config = config or SyncConfig()

    class AsyncTrainer(_plain(ppo_trainer_async.TrainingActor), Synced):  # type: ignore[misc]
        sync_config = config or SyncConfig()

    vllm_engine.RolloutRayActor = ray.remote(Rollout)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(Policy)
    ppo_trainer.PPOTrainer = ray.remote(Trainer)
    ppo_trainer_async.TrainingActor = ray.remote(AsyncTrainer)


def _plain(actor: Any) -> Any:  # noqa: ANN401 - Ray's
    """Return the class that `ray.remote` was given."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__
