"""GRPO on a laptop: FSDP2 shards train, engines sample, and every step ends with an update.

with local_cluster(folder / "logs", threads_per_actor=1):
    report = run(load_recipe(Path("recipes/quickstart.yaml")), folder, Screen(Console()))
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils.logging import disable_progress_bar

from actors.detached import end_all
from recipes.calls import collect
from recipes.launcher import Launcher
from recipes.model import build_checkpoint
from recipes.recipe import Recipe
from recipes.rollouts import roll_out
from recipes.run_report import RunReport, StepRow
from recipes.screen import Screen
from recipes.steps import train, update
from recipes.survival import find_actors, read_back, take_trainers
from recipes.task import ProblemSampler
from weightsync import WeightSync

if TYPE_CHECKING:
    from weightsync.faults import FaultPlan

__all__ = ["run"]


def run(recipe: Recipe, folder: Path, screen: Screen, chaos: FaultPlan | None = None) -> RunReport:
    """The whole loop; needs a Ray cluster. ``report.json`` is written to `folder` however it ends.

    `chaos` is injected as soon as everybody is connected; the run then ends when all are healed.

    With ``resume: true``, the run goes on after the version that an earlier driver, which died, had
    committed. A step in whose midst it died is done anew. Raises StateError when trainers are gone.
    """
    loop = recipe.loop
    report = RunReport(name=recipe.name, seed=loop.seed)
    healed: list[Mapping[str, object]] = []
    launcher = Launcher(recipe, folder / "model")
    sync = WeightSync(recipe.sync, name=recipe.name if recipe.resume else None)
    try:
        disable_progress_bar()
        left = find_actors(recipe)
        if left:
            read_back(folder / "report.json", report)
        report.write(folder / "report.json")
        healed += report.heals
        with screen.stage("build the model"):
            build_checkpoint(folder / "model", recipe.model, seed=loop.seed)
        who = f"{recipe.trainers.count} trainers and {len(recipe.engine_specs)} engines"
        with screen.stage(f"start {who} on {launcher}"):
            engines = {
                name: left.get(f"engine {name}") or launcher.engine(name) for name in recipe.engine_specs
            }
            trainers = take_trainers(left, recipe) or launcher.trainers()
            infos = {name: engine.info.remote() for name, engine in engines.items()}
            report.engines = collect(infos, "start", recipe.sync.connect_timeout_s)
        for name, info in report.engines.items():
            screen.line(f"engine {name}: {info['kind']} ({info['why']})")
        with screen.stage("connect"):
            sync.register_trainers(list(trainers.values()))
            sync.register_engines(engines, respawn=launcher.engine)
            sync.connect()
        if chaos is not None:
            sync.inject(chaos)
        screen.line(str(sync.plan.explain()))
        if left:
            served_by = ", ".join(sync.serving()) or "nobody"
            screen.line(f"taken over from a driver that died: version {sync.version}, served by {served_by}")
        if not sync.serving():
            last = max([sync.version, *(row.version for row in report.steps)])
            screen.line(str(sync.update_weights(version=last + 1)))
        report.steps = [row for row in report.steps if row.version <= sync.version]

        problems, seeds = ProblemSampler(loop.seed), random.Random(loop.seed)
        for _ in range(1, sync.version):  # what was drawn for the steps that are done
            problems.sample(loop.prompts_per_step)
            for _ in engines:
                seeds.getrandbits(32)
        for step in range(sync.version, loop.steps + 1):
            prompts = problems.sample(loop.prompts_per_step)
            rollouts = roll_out(prompts, sync.serving, loop, seeds, recipe.sync.timeout_s)
            for error in rollouts.lost.values():
                screen.line(f"{error}; others took over its prompts")
            train(rollouts.groups, trainers, recipe.sync.timeout_s)
            done = update(sync, step + 1, recipe, screen)
            row = StepRow(
                step=step,
                version=done.version,
                reward=rollouts.reward,
                sync_seconds=done.seconds,
                bytes=done.nbytes,
                verified=done.verified,
                engines=dict(done.engines),
                rollout_versions=rollouts.versions,
            )
            report.steps.append(row)
            report.heals = [*healed, *(heal.to_dict() for heal in sync.heals)]
            report.write(folder / "report.json")
            screen.step(row, loop.steps)
        if chaos is not None:
            with screen.stage("heal"):
                sync.settle(recipe.sync.connect_timeout_s)
        report.status = "done" if report.final_reward >= loop.target_reward else "below target"
        screen.summary(report, loop.target_reward, sync.heals)
        screen.line(f"report: {folder / 'report.json'}")
    finally:
        if report.status == "running":
            report.status = "failed"
        report.heals = [*healed, *(heal.to_dict() for heal in sync.heals)]
        report.write(folder / "report.json")
        sync.close()
        launcher.close()
        if recipe.resume:
            end_all(recipe.name)
    return report
