"""Parts that runs share: start a fleet, train, sleep, update, and write the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any

from ray.actor import ActorHandle
from transformers.utils.logging import disable_progress_bar

from weightsync import SyncReport, WeightSync, WeightSyncError
from weightsync.errors import DeadlineError, EngineError, PeerLostError
from weightsync.recipes.config.events import present_at_start
from weightsync.recipes.config.recipe import Recipe
from weightsync.recipes.fleet.calls import collect
from weightsync.recipes.fleet.launcher import Launcher
from weightsync.recipes.fleet.survival import begun, take_trainers
from weightsync.recipes.loops.policy import Policy
from weightsync.recipes.report.page import page
from weightsync.recipes.report.run_folder import RunFolder, replace_text
from weightsync.recipes.report.run_report import RunReport
from weightsync.recipes.report.screen import Screen
from weightsync.recipes.report.trace import write_trace
from weightsync.recipes.training.grpo import PromptGroup
from weightsync.recipes.training.model import build_checkpoint


def start(
    recipe: Recipe,
    launcher: Launcher,
    policy: Policy,
    screen: Screen,
    respawn: Callable[[str], ActorHandle[Any]] | None = None,
    left: Mapping[str, ActorHandle[Any]] = MappingProxyType({}),
) -> tuple[Mapping[str, ActorHandle[Any]], dict[str, Mapping[str, str]]]:
    """Build the model, start the actors that are not `left` of an earlier run, and connect them.

    Engines that events add are left out. Returns the trainers, and the `info` of each engine.
    """
    disable_progress_bar()
    with screen.stage("build the model"):
        build_checkpoint(launcher.model, recipe.model, seed=recipe.loop.seed)
        if recipe.draft and launcher.draft:
            build_checkpoint(launcher.draft, recipe.draft.form(recipe.model), seed=recipe.loop.seed)
    names = present_at_start(recipe.engine_specs, recipe.events)
    with screen.stage(f"{begun(recipe, names, left)} on {launcher}"):
        engines = {name: left.get(f"engine {name}") or launcher.engine(name) for name in names}
        trainers = take_trainers(left, recipe) or launcher.trainers()
        calls = {name: engine.info.remote() for name, engine in engines.items()}
        infos = collect(calls, "start", recipe.sync.connect_timeout_s)
    with screen.stage("connect", has_bar=True):
        policy.connect(trainers, engines, respawn)
    return trainers, infos


def train(
    groups: Sequence[PromptGroup], trainers: Mapping[str, ActorHandle[Any]], timeout_s: float
) -> dict[str, float]:
    """Train each rank on a share of `groups`. Returns the mean of each of the ranks' figures."""
    calls = {
        name: trainer.train_step.remote(groups[rank :: len(trainers)])
        for rank, (name, trainer) in enumerate(trainers.items())
    }
    ranks = list(collect(calls, "train", timeout_s).values())
    return {name: fmean(rank[name] for rank in ranks) for name in ranks[0]}


def sleep(sync: WeightSync, recipe: Recipe, screen: Screen) -> None:
    """Let engines sleep if the recipe has ``loop.sleep``. Reports engines that fail to sleep."""
    if recipe.loop.sleep:
        try:
            sync.sleep(level=recipe.loop.sleep)
        except (DeadlineError, EngineError, PeerLostError) as error:
            screen.line(f"not all engines sleep: {error}")


def update(
    policy: Policy, sync: WeightSync, version: int, recipe: Recipe, screen: Screen
) -> tuple[SyncReport, str]:
    """Update to `version`, and once more after heals if it fails. Returns the first error, or empty."""
    try:
        return policy.update(version), ""
    except WeightSyncError as error:
        screen.line(f"version {version} did not commit: {error}")
        sync.settle(recipe.sync.connect_timeout_s)
        return policy.update(version), str(error)


def leave(report: RunReport, folder: RunFolder, updates: Sequence[SyncReport] | None) -> None:
    """Write the run's page and, if `updates` are given, ``trace.json``; see `write_trace`."""
    folder.write("report.html", lambda path: replace_text(path, page(report)))
    if updates is not None:
        folder.write("trace.json", lambda path: write_trace(path, updates, report.heals))
