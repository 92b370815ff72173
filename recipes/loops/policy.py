"""The weights that a run trains and updates: the whole model, or a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from weightsync import SyncReport, WeightSync
from weightsync.recipes.config.recipe import Recipe

Actors = Mapping[str, ActorHandle[Any]]
Respawn = Callable[[str], ActorHandle[Any]]


class Policy:
    """The whole model.

    Attributes:
        adapter: the adapter that rollouts ask; empty for none.
    """

    adapter = ""

    def __init__(self, sync: WeightSync, deployments: Mapping[str, Sequence[str]]) -> None:
        self._sync, self._deployments = sync, deployments

    @property
    def version(self) -> int:
        """The last committed version."""
        return self._sync.version

    @property
    def is_served(self) -> bool:
        """True if an engine serves a version."""
        return bool(self._sync.serving())

    def connect(self, trainers: Actors, engines: Actors, respawn: Respawn | None) -> None:
        """Connect trainers with engines."""
        self._sync.register_trainers(list(trainers.values()))
        self._sync.register_engines(engines, respawn=respawn, deployments=self._deployments)
        self._sync.connect()

    def update(self, version: int) -> SyncReport:
        """Move `version` from trainers to engines."""
        return self._sync.update_weights(version)


class AdapterPolicy(Policy):
    """An adapter. The base model comes from the trainers' first checkpoint."""

    adapter = "policy"

    def __init__(self, sync: WeightSync, model: Path) -> None:
        super().__init__(sync, {})
        self._model = model

    @property
    def version(self) -> int:
        return self._sync.adapter_versions().get(self.adapter, 0)

    @property
    def is_served(self) -> bool:
        return self.version > 0

    def connect(self, trainers: Actors, engines: Actors, respawn: Respawn | None) -> None:
        self._sync.register_engines(engines, respawn=respawn)
        self._sync.register_checkpoint("base", [str(self._model)])
        self._sync.connect()
        self._sync.update_weights(checkpoint="base")
        self._sync.register_adapter(self.adapter, list(trainers.values()))

    def update(self, version: int) -> SyncReport:
        return self._sync.update_adapter(self.adapter, version)


def make_policy(recipe: Recipe, sync: WeightSync, model: Path) -> Policy:
    """Return the policy of `recipe`. `model`: the trainers' first checkpoint."""
    return AdapterPolicy(sync, model) if recipe.trainers.lora else Policy(sync, recipe.deployments)
