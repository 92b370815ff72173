"""GRPO on a laptop: FSDP2 shards train, engines sample, and every step ends with an update.

with local_cluster(folder / "logs", threads_per_actor=1):
    report = run(load_recipe(Path("recipes/quickstart.yaml")), folder, Screen(Console()))
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
from transformers.utils.logging import disable_progress_bar

from actors.engine import EngineActor
from recipes.calls import collect
from recipes.grpo import Group
from recipes.model import build_checkpoint
from recipes.recipe import Recipe
from recipes.run_report import RunReport, StepRow
from recipes.screen import Screen
from recipes.task import Problem, ProblemSampler, reward
from recipes.trainer import GrpoTrainer
from weightsync import WeightSync

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    Actor: TypeAlias = ActorHandle[Any]

__all__ = ["run"]


def run(recipe: Recipe, folder: Path, screen: Screen) -> RunReport:
    """The whole loop; needs a Ray cluster. ``report.json`` is written to `folder` however it ends."""
    loop = recipe.loop
    report = RunReport(name=recipe.name, seed=loop.seed)
    sync = WeightSync(recipe.sync)
    try:
        disable_progress_bar()
        with screen.stage("build the model"):
            model = build_checkpoint(folder / "model", recipe.model, seed=loop.seed)
        with screen.stage(f"start {recipe.trainers.count} trainers and {len(recipe.engine_specs)} engines"):
            engines = _start_engines(recipe, model)
            trainers = _start_trainers(recipe, model)
            infos = {name: engine.info.remote() for name, engine in engines.items()}
            report.engines = collect(infos, "start", recipe.sync.connect_timeout_s)
        for name, info in report.engines.items():
            screen.line(f"engine {name}: {info['kind']} ({info['why']})")
        with screen.stage("connect"):
            sync.register_trainers(list(trainers.values()))
            sync.register_engines(engines)
            sync.connect()
        screen.line(str(sync.plan.explain()))
        screen.line(str(sync.update_weights(version=1)))

        problems, seeds = ProblemSampler(loop.seed), random.Random(loop.seed)
        for step in range(1, loop.steps + 1):
            groups, versions = _roll_out(problems.sample(loop.prompts_per_step), engines, recipe, seeds)
            _train(groups, trainers, recipe)
            update = sync.update_weights(version=step + 1)
            row = StepRow(
                step=step,
                version=update.version,
                reward=_mean_reward(groups),
                sync_seconds=update.seconds,
                bytes=update.nbytes,
                verified=update.verified,
                engines=dict(update.engines),
                rollout_versions=versions,
            )
            report.steps.append(row)
            report.write(folder / "report.json")
            screen.step(row, loop.steps)
        report.status = "done" if report.final_reward >= loop.target_reward else "below target"
        screen.summary(report, loop.target_reward)
        screen.line(f"report: {folder / 'report.json'}")
    finally:
        if report.status == "running":
            report.status = "failed"
        report.write(folder / "report.json")
        sync.close()
    return report


def _start_engines(recipe: Recipe, model: Path) -> dict[str, Actor]:
    actor = ray.remote(EngineActor).options(num_cpus=0, max_restarts=0)
    return {
        name: actor.remote(
            spec.kind,
            str(model),
            name,
            {"tensor_parallel_size": spec.tensor_parallel_size},
            _slot(recipe, index),
        )
        for index, (name, spec) in enumerate(recipe.engine_specs.items())
    }


def _start_trainers(recipe: Recipe, model: Path) -> dict[str, Actor]:
    actor = ray.remote(GrpoTrainer).options(num_cpus=0, max_restarts=0)
    count, timeout_s = recipe.trainers.count, recipe.sync.connect_timeout_s
    trainers = {
        f"trainer {rank}": actor.remote(rank, count, str(model), recipe.loop, _slot(recipe, rank))
        for rank in range(count)
    }
    (port,) = collect({"trainer 0": trainers["trainer 0"].listen.remote()}, "listen", timeout_s).values()
    collect({name: trainer.join.remote(port) for name, trainer in trainers.items()}, "join", timeout_s)
    return trainers


def _slot(recipe: Recipe, index: int) -> str | None:
    return str(index) if recipe.placement == "colocated" else None


def _roll_out(
    problems: Sequence[Problem], engines: Mapping[str, Actor], recipe: Recipe, seeds: random.Random
) -> tuple[list[Group], list[int]]:
    """A group of completions for each problem, shared out among the engines; and who made them.

    Each call has a seed of its own: engines that share one would explore the same way.
    """
    size = recipe.loop.group_size
    shares = {name: problems[i :: len(engines)] for i, name in enumerate(engines)}
    calls = {
        name: engine.generate.remote(
            [problem.prompt for problem in shares[name] for _ in range(size)],
            {"max_tokens": 1, "temperature": recipe.loop.temperature, "seed": seeds.getrandbits(32)},
        )
        for name, engine in engines.items()
    }
    groups, versions = [], set()
    for name, rollout in collect(calls, "generate", recipe.sync.timeout_s).items():
        versions.add(rollout.version)
        for index, problem in enumerate(shares[name]):
            tokens = rollout.tokens[index * size : (index + 1) * size]
            groups.append(Group(problem.prompt, tokens, [reward(problem, done) for done in tokens]))
    return groups, sorted(versions)


def _train(groups: Sequence[Group], trainers: Mapping[str, Actor], recipe: Recipe) -> None:
    calls = {
        name: trainer.train_step.remote(groups[rank :: len(trainers)])
        for rank, (name, trainer) in enumerate(trainers.items())
    }
    collect(calls, "train", recipe.sync.timeout_s)


def _mean_reward(groups: Sequence[Group]) -> float:
    rewards = [value for group in groups for value in group.rewards]
    return sum(rewards) / len(rewards)
