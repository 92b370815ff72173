"""GRPO while engines are added, removed and killed. Training does not wait for them.

folder = RunFolder(Path("runs/NAME"))
with local_cluster(folder, threads_per_actor=1):
    report = run(load_recipe(Path("recipes/elastic.yaml")), folder, Screen(Console()))
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
from transformers.utils.logging import disable_progress_bar

from weightsync import SyncReport, WeightSync
from weightsync.plan.explain import count_text
from weightsync.recipes.calls import collect
from weightsync.recipes.events import present_at_start
from weightsync.recipes.launcher import Launcher
from weightsync.recipes.model import build_checkpoint
from weightsync.recipes.recipe import Recipe
from weightsync.recipes.rollouts import roll_out
from weightsync.recipes.run_folder import RunFolder
from weightsync.recipes.run_report import RunReport, StepRow
from weightsync.recipes.screen import Screen
from weightsync.recipes.steps import leave, train, update
from weightsync.recipes.task import ProblemSampler

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from weightsync.faults import FaultPlan

    Actor: TypeAlias = ActorHandle[Any]

__all__ = ["run"]


def run(
    recipe: Recipe, folder: RunFolder, screen: Screen, chaos: FaultPlan | None = None, *, trace: bool = False
) -> RunReport:
    """Run the whole loop.

    Needs a Ray cluster. Leaves in `folder` what the quickstart leaves.
    """
    loop, patience_s = recipe.loop, recipe.sync.connect_timeout_s
    report = RunReport(name=recipe.name, seed=loop.seed, target_reward=loop.target_reward)
    updates: list[SyncReport] = []
    launcher = Launcher(recipe, folder.path / "model")
    report.devices = str(launcher)
    sync = WeightSync(recipe.sync)
    coming: dict[str, tuple[Actor, ObjectRef[Any]]] = {}  # started, not up yet
    try:
        disable_progress_bar()
        with screen.stage("build the model"):
            build_checkpoint(folder.path / "model", recipe.model, seed=loop.seed)
        first = present_at_start(recipe.engine_specs, recipe.events)
        who = f"{count_text(recipe.trainers.count, 'trainer')} and {count_text(len(first), 'engine')}"
        with screen.stage(f"start {who} on {launcher}"):
            engines = {name: launcher.engine(name) for name in first}
            trainers = launcher.trainers()
            infos = {name: engine.info.remote() for name, engine in engines.items()}
            report.engines = collect(infos, "start", patience_s)
        with screen.stage("connect"):
            sync.register_trainers(list(trainers.values()))
            sync.register_engines(engines, respawn=launcher.engine)
            sync.connect()
        if chaos is not None:
            sync.inject(chaos)
        report.links = sync.links()
        screen.line(str(sync.plan.explain()))
        updates.append(sync.update_weights(1))
        screen.line(str(updates[0]))

        problems, seeds = ProblemSampler(loop.seed), random.Random(loop.seed)
        for step in range(1, loop.steps + 1):
            for event in (event for event in recipe.events if event.step == step):
                screen.line(f"before step {step}: {event.action} engine {event.engine}")
                if event.action == "add":
                    engine = launcher.engine(event.engine)
                    coming[event.engine] = engine, engine.info.remote()
                    continue
                report.engines |= _join(coming, sync, screen, patience_s, awaited=[event.engine])
                sync.settle(patience_s)
                engine = sync.serving()[event.engine]
                if event.action == "remove":
                    sync.remove_engine(event.engine)
                ray.kill(engine)
            report.engines |= _join(coming, sync, screen, patience_s)
            rollouts = roll_out(
                problems.sample(loop.prompts_per_step), sync.serving, loop, seeds, recipe.sync.timeout_s
            )
            for error in rollouts.lost.values():
                screen.line(f"{error}; others took over its prompts")
            train(rollouts.groups, trainers, recipe.sync.timeout_s)
            done, retried = update(sync, step + 1, recipe, screen)
            updates.append(done)
            row = StepRow.of(step, rollouts.reward, rollouts.versions, done, retried)
            report.steps.append(row)
            report.heals, report.spans = [*sync.heals], done.spans
            folder.write("report.json", report.write)
            screen.step(row, loop.steps)
        with screen.stage("settle"):
            report.engines |= _join(coming, sync, screen, patience_s, awaited=[*coming])
            sync.settle(patience_s)
        screen.line(f"served by {', '.join(sync.serving())}")
        report.status = "done" if report.final_reward >= loop.target_reward else "below target"
        report.heals = [*sync.heals]
        screen.summary(report)
    finally:
        if report.status == "running":
            report.status = "failed"
        report.heals = [*sync.heals]
        folder.write("report.json", report.write)
        sync.close()
        launcher.close()
        leave(report, folder, updates if trace else None)
    return report


def _join(
    coming: dict[str, tuple[Actor, ObjectRef[Any]]],
    sync: WeightSync,
    screen: Screen,
    timeout_s: float,
    awaited: Collection[str] = (),
) -> Mapping[str, Mapping[str, str]]:
    """Add those of the `coming` engines that are up, waiting for the `awaited` ones.

    Returns their infos.
    """
    up = {
        name: info for name, (_, info) in coming.items() if name in awaited or ray.wait([info], timeout=0)[0]
    }
    infos = collect(up, "start", timeout_s)
    for name in up:
        sync.add_engine(name, coming.pop(name)[0])
        screen.line(f"engine {name} joined, and serves version {sync.engine_versions()[name]}")
    return infos
