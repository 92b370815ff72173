"""The two halves of a step that every loop shares: training, and the update that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipes.calls import collect
from weightsync import SyncReport, WeightSync, WeightSyncError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from recipes.grpo import Group
    from recipes.recipe import Recipe
    from recipes.screen import Screen

__all__ = ["train", "update"]


def train(groups: Sequence[Group], trainers: Mapping[str, ActorHandle[Any]], timeout_s: float) -> None:
    """Each rank trains on its share of `groups`."""
    calls = {
        name: trainer.train_step.remote(groups[rank :: len(trainers)])
        for rank, (name, trainer) in enumerate(trainers.items())
    }
    collect(calls, "train", timeout_s)


def update(sync: WeightSync, version: int, recipe: Recipe, screen: Screen) -> SyncReport:
    """One update; what too few engines took is tried once more when they are healed."""
    try:
        return sync.update_weights(version)
    except WeightSyncError as error:
        screen.line(f"version {version} did not commit: {error}")
        sync.settle(recipe.sync.connect_timeout_s)
        return sync.update_weights(version)
