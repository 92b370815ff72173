"""Actors and results of a run that outlive the driver."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from weightsync.actors.holders.detached import actor_name, detached, find
from weightsync.errors import StateError
from weightsync.recipes.config.recipe import Recipe
from weightsync.recipes.report.run_report import RunReport, read_report
from weightsync.text import count_text


def actor_options(recipe: Recipe, process: str) -> dict[str, Any]:
    """Return Ray's options for an actor such as ``trainer 0``, which reserves nothing."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    return options | (detached(actor_name(recipe.name, process)) if recipe.resume else {})


def find_actors(recipe: Recipe) -> Mapping[str, ActorHandle[Any]]:
    """Return the living actors of an earlier driver, such as ``engine main-0``, by name."""
    outlast = [process for process in recipe.members if recipe.resume and not process.startswith("holder ")]
    return {process: actor for process in outlast if (actor := find(actor_name(recipe.name, process)))}


def begun(recipe: Recipe, engines: Collection[str], left: Collection[str]) -> str:
    """Return a line with the numbers of trainers and `engines` that are started, or `left` and taken over."""
    num_left = sum(f"engine {name}" in left for name in engines)
    trainers = count_text(recipe.trainers.count, "trainer")
    new = count_text(len(engines) - num_left, "engine")
    if not left:
        return f"start {trainers} and {new}"
    taken = f"take over {trainers} and {count_text(num_left, 'engine')}"
    return taken if num_left == len(engines) else f"{taken}, start {new}"


def take_trainers(left: Mapping[str, ActorHandle[Any]], recipe: Recipe) -> dict[str, ActorHandle[Any]]:
    """Return the trainers among `left`, in rank order. Empty if no actor is left.

    Raises StateError if some of the recipe's trainers are missing.
    """
    trainers = [process for process in recipe.members if process.startswith("trainer ")]
    gone = [process for process in trainers if left and process not in left]
    if gone:
        raise StateError(
            f"{', '.join(gone)} of run {recipe.name} is gone, and with it the state of the training. All"
            " other actors are ended now: give the same command to start the run from the beginning"
        )
    return {process: left[process] for process in trainers if left}


def read_back(path: Path, report: RunReport) -> None:
    """Copy the steps and heals of an earlier driver's report at `path`, if there is one."""
    if path.exists():
        earlier = read_report(path)
        report.started = earlier.started
        report.steps, report.heals = earlier.steps, earlier.heals
