"""Runs `weightsync bench`: only updates of a recipe's fleet, with new weights each time.

with local_cluster(RunFolder(folder), threads_per_actor=1):
    report = run(load_recipe(Path("recipes/quickstart.yaml")), folder, Screen(Console()), num_updates=10)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from weightsync import SyncReport, WeightSync
from weightsync.recipes.config.events import present_at_start
from weightsync.recipes.config.recipe import Recipe
from weightsync.recipes.fleet.calls import collect
from weightsync.recipes.fleet.launcher import Launcher
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.loops.policy import Policy, make_policy
from weightsync.recipes.loops.steps import start
from weightsync.recipes.report.bench_report import BenchReport
from weightsync.recipes.report.screen import Screen
from weightsync.recipes.report.time_shares import ON_CPUS
from weightsync.text import count_text

NUM_WARM = 2
"""Number of updates before the measured updates. They touch memory for the first time."""


def run(
    recipe: Recipe,
    folder: Path,
    screen: Screen,
    num_updates: int,
    cluster: tuple[str, HostSpec] | None = None,
) -> BenchReport:
    """Start the fleet of a recipe and measure updates. Needs a Ray cluster.

    Engines that events add later are left out. `cluster` is the name and the link rates of the hosts.

    Raises:
        WeightSyncError: an engine or an update failed. Other times would not be representative.
    """
    with screen.waiting(f"place {count_text(recipe.num_devices, 'device')}"):
        launcher = Launcher(recipe, folder / "model")
    num_engines = len(present_at_start(recipe.engine_specs, recipe.events))
    sync = WeightSync(replace(recipe.sync, min_engines=num_engines))
    policy = make_policy(recipe, sync, launcher.model)
    try:
        trainers, kinds = start(recipe, launcher, policy, screen)
        with screen.stage(count_text(num_updates, "update")):
            updates = [_update(policy, sync, trainers, recipe) for _ in range(NUM_WARM + num_updates)]
        made = BenchReport.of(recipe.name, str(launcher), kinds, updates[NUM_WARM:], sync.links(), cluster)
    finally:
        sync.close()
        launcher.close()
    screen.line(str(made))
    if cluster and not launcher.has_gpus:
        screen.line(ON_CPUS.format(cluster[0]))
    return made


def _update(
    policy: Policy, sync: WeightSync, trainers: Mapping[str, ActorHandle[Any]], recipe: Recipe
) -> SyncReport:
    """Update to new weights, after holders have copied the last version."""
    patience_s = recipe.sync.connect_timeout_s
    sync.settle(patience_s)
    if recipe.loop.sleep:
        sync.sleep(level=recipe.loop.sleep)
    collect({name: trainer.scramble.remote() for name, trainer in trainers.items()}, "scramble", patience_s)
    return policy.update(policy.version + 1)
