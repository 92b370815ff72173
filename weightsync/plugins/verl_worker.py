"""An extension of vLLM's workers with verl's methods and weightsync's::

actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls: weightsync.plugins.verl_worker.Worker
"""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from weightsync.engines.vllm.worker import WeightSyncWorker


class Worker(vLLMColocateWorkerExtension, WeightSyncWorker):  # type: ignore[misc]  # verl has no types
    """Mixed into vLLM's worker class. verl's other ways to load weights continue to work."""
