"""GRPO on a laptop: FSDP2 shards train, engines sample, and every step ends with an update.

with local_cluster(folder / "logs", threads_per_actor=1):
    report = run(load_recipe(Path("recipes/quickstart.yaml")), folder, Screen(Console()))
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
from transformers.utils.logging import disable_progress_bar

from actors.detached import end_all
from actors.engine import EngineActor
from recipes.calls import collect
from recipes.grpo import Group
from recipes.model import build_checkpoint
from recipes.page import write_page
from recipes.recipe import Recipe
from recipes.rollouts import roll_out
from recipes.run_report import RunReport, StepRow
from recipes.screen import Screen
from recipes.survival import actor_options, find_actors, read_back, take_trainers
from recipes.task import ProblemSampler
from recipes.trace import write_trace
from recipes.trainer import GrpoTrainer
from weightsync import SyncReport, WeightSync, WeightSyncError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from weightsync.faults import FaultPlan
    from weightsync.report import HealReport

    Actor: TypeAlias = ActorHandle[Any]

__all__ = ["run"]


def run(
    recipe: Recipe, folder: Path, screen: Screen, chaos: FaultPlan | None = None, *, trace: bool = False
) -> RunReport:
    """The whole loop; needs a Ray cluster. However it ends, `folder` has a ``report.json`` and a page of it.

    `trace` leaves a ``trace.json`` there too, see `write_trace`.

    `chaos` is injected as soon as everybody is connected; the run then ends when all are healed.

    With ``resume: true``, the run goes on after the version that an earlier driver, which died, had
    committed. A step in whose midst it died is done anew. Raises StateError when trainers are gone.
    """
    loop = recipe.loop
    report = RunReport(name=recipe.name, seed=loop.seed, target_reward=loop.target_reward)
    healed: list[HealReport] = []
    updates: list[SyncReport] = []
    sync = WeightSync(recipe.sync, name=recipe.name if recipe.resume else None)
    try:
        disable_progress_bar()
        left = find_actors(recipe)
        if left:
            read_back(folder / "report.json", report)
        report.write(folder / "report.json")
        healed += report.heals
        with screen.stage("build the model"):
            model = build_checkpoint(folder / "model", recipe.model, seed=loop.seed)
        with screen.stage(f"start {recipe.trainers.count} trainers and {len(recipe.engine_specs)} engines"):
            start = partial(_start_engine, recipe, model)
            engines = {name: left.get(f"engine {name}") or start(name) for name in recipe.engine_specs}
            trainers = take_trainers(left, recipe) or _start_trainers(recipe, model)
            infos = {name: engine.info.remote() for name, engine in engines.items()}
            report.engines = collect(infos, "start", recipe.sync.connect_timeout_s)
        for name, info in report.engines.items():
            screen.line(f"engine {name}: {info['kind']} ({info['why']})")
        with screen.stage("connect"):
            sync.register_trainers(list(trainers.values()))
            sync.register_engines(engines, respawn=start)
            sync.connect()
        if chaos is not None:
            sync.inject(chaos)
        report.links = sync.links()
        screen.line(str(sync.plan.explain()))
        if left:
            served_by = ", ".join(sync.serving()) or "nobody"
            screen.line(f"taken over from a driver that died: version {sync.version}, served by {served_by}")
        if not sync.serving():
            last = max([sync.version, *(row.version for row in report.steps)])
            updates.append(sync.update_weights(version=last + 1))
            screen.line(str(updates[-1]))
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
            _train(rollouts.groups, trainers, recipe)
            update, retried = _update(sync, step + 1, recipe, screen)
            updates.append(update)
            row = StepRow.of(step, _mean_reward(rollouts.groups), rollouts.versions, update, retried)
            report.steps.append(row)
            report.heals, report.spans = [*healed, *sync.heals], update.spans
            report.write(folder / "report.json")
            screen.step(row, loop.steps)
        if chaos is not None:
            with screen.stage("heal"):
                sync.settle(recipe.sync.connect_timeout_s)
        report.status = "done" if report.final_reward >= loop.target_reward else "below target"
        report.heals = [*healed, *sync.heals]
        screen.summary(report)
        screen.line(f"report: {folder / 'report.json'}, {folder / 'report.html'}")
    finally:
        if report.status == "running":
            report.status = "failed"
        report.heals = [*healed, *sync.heals]
        report.write(folder / "report.json")
        sync.close()
        if recipe.resume:
            end_all(recipe.name)
        write_page(report, folder / "report.html")
        if trace:
            write_trace(folder / "trace.json", updates, sync.heals)
    return report


def _update(sync: WeightSync, version: int, recipe: Recipe, screen: Screen) -> tuple[SyncReport, str]:
    """One update; what too few engines took is tried once more when they are healed, and why is returned."""
    try:
        return sync.update_weights(version), ""
    except WeightSyncError as error:
        screen.line(f"version {version} did not commit: {error}")
        sync.settle(recipe.sync.connect_timeout_s)
        return sync.update_weights(version), str(error)


def _start_engine(recipe: Recipe, model: Path, name: str) -> Actor:
    spec = recipe.engine_specs[name]
    actor = ray.remote(EngineActor).options(**actor_options(recipe, f"engine {name}"))
    options = {"tensor_parallel_size": spec.tensor_parallel_size}
    slot = _slot(recipe, list(recipe.engine_specs).index(name))
    engine: Actor = actor.remote(spec.kind, str(model), name, options, slot)
    return engine


def _start_trainers(recipe: Recipe, model: Path) -> dict[str, Actor]:
    actor = ray.remote(GrpoTrainer)
    count, timeout_s = recipe.trainers.count, recipe.sync.connect_timeout_s
    trainers = {
        who: actor.options(**actor_options(recipe, who)).remote(
            rank, count, str(model), recipe.loop, _slot(recipe, rank)
        )
        for rank, who in enumerate(f"trainer {rank}" for rank in range(count))
    }
    (port,) = collect({"trainer 0": trainers["trainer 0"].listen.remote()}, "listen", timeout_s).values()
    collect({name: trainer.join.remote(port) for name, trainer in trainers.items()}, "join", timeout_s)
    return trainers


def _slot(recipe: Recipe, index: int) -> str | None:
    return str(index) if recipe.placement == "colocated" else None


def _train(groups: Sequence[Group], trainers: Mapping[str, Actor], recipe: Recipe) -> None:
    calls = {
        name: trainer.train_step.remote(groups[rank :: len(trainers)])
        for rank, (name, trainer) in enumerate(trainers.items())
    }
    collect(calls, "train", recipe.sync.timeout_s)


def _mean_reward(groups: Sequence[Group]) -> float:
    rewards = [value for group in groups for value in group.rewards]
    return sum(rewards) / len(rewards)
