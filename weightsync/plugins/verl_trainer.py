"""verl's trainer `separate_async` with `Manager`, as ``trainer.v1.trainer_mode=weightsync``.

verl imports this module if the environment variable ``VERL_USE_EXTERNAL_MODULES`` names it.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, register_trainer

from weightsync.plugins.verl_manager import Manager


@register_trainer("weightsync")
class Trainer(PPOTrainerSeparateAsync):  # type: ignore[misc]  # verl has no types
    """Updates rollouts on GPUs of their own by `Manager`, and rollouts on the trainers' GPUs as verl does."""

    standalone_checkpoint_manager: Any

    def _setup(self) -> None:
        super()._setup()
        made = self.standalone_checkpoint_manager
        self.standalone_checkpoint_manager = Manager(made.config, made.actor_wg, made.replicas)
