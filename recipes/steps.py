"""Parts that every loop shares: train, sleep, update, and write the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsync import SyncReport, WeightSync, WeightSyncError
from weightsync.errors import DeadlineError, EngineError, PeerLostError
from weightsync.recipes.calls import collect
from weightsync.recipes.page import page
from weightsync.recipes.run_folder import replace_text
from weightsync.recipes.trace import write_trace

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from weightsync.recipes.grpo import Group
    from weightsync.recipes.recipe import Recipe
    from weightsync.recipes.run_folder import RunFolder
    from weightsync.recipes.run_report import RunReport
    from weightsync.recipes.screen import Screen

__all__ = ["leave", "sleep", "train", "update"]


def train(groups: Sequence[Group], trainers: Mapping[str, ActorHandle[Any]], timeout_s: float) -> None:
    """Train each rank on its share of `groups`."""
    calls = {
        name: trainer.train_step.remote(groups[rank :: len(trainers)])
        for rank, (name, trainer) in enumerate(trainers.items())
    }
    collect(calls, "train", timeout_s)


def sleep(sync: WeightSync, recipe: Recipe, screen: Screen) -> None:
    """Make engines sleep if the recipe asks for it.

    Reports engines that fail to sleep.
    """
    if recipe.loop.sleep:
        try:
            sync.sleep(level=recipe.loop.sleep)
        except (DeadlineError, EngineError, PeerLostError) as error:
            screen.line(f"not all engines sleep: {error}")


def update(sync: WeightSync, version: int, recipe: Recipe, screen: Screen) -> tuple[SyncReport, str]:
    """Update to `version`, and once more after heals if it fails.

    Returns the first error, or empty.
    """
    try:
        return sync.update_weights(version), ""
    except WeightSyncError as error:
        screen.line(f"version {version} did not commit: {error}")
        sync.settle(recipe.sync.connect_timeout_s)
        return sync.update_weights(version), str(error)


def leave(report: RunReport, folder: RunFolder, updates: Sequence[SyncReport] | None) -> None:
    """Write the run's page and, if `updates` are given, ``trace.json``; see `write_trace`."""
    folder.write("report.html", lambda path: replace_text(path, page(report)))
    if updates is not None:
        folder.write("trace.json", lambda path: write_trace(path, updates, report.heals))
