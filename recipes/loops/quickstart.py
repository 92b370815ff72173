"""GRPO on a laptop: FSDP2 shards train, engines sample, each step updates them.

folder = RunFolder(Path("runs/NAME"))
with local_cluster(folder, threads_per_actor=1):
    report = run(load_recipe(Path("recipes/quickstart.yaml")), folder, Screen(Console()))
"""

from __future__ import annotations

import random

from weightsync import SyncReport, WeightSync
from weightsync.actors.holders.detached import end_all
from weightsync.faults import FaultPlan
from weightsync.recipes.config.recipe import Recipe
from weightsync.recipes.fleet.launcher import Launcher
from weightsync.recipes.fleet.survival import find_actors, read_back
from weightsync.recipes.loops.acceptance import acceptance, count_drafts
from weightsync.recipes.loops.elastic import Elastic
from weightsync.recipes.loops.policy import make_policy
from weightsync.recipes.loops.rollouts import roll_out
from weightsync.recipes.loops.steps import leave, sleep, start, train, update
from weightsync.recipes.report.run_folder import RunFolder
from weightsync.recipes.report.run_report import RunReport, StepRow
from weightsync.recipes.report.screen import Screen
from weightsync.recipes.training.task import ProblemSampler
from weightsync.report import HealReport, coverage_table
from weightsync.text import count_text


def run(
    recipe: Recipe, folder: RunFolder, screen: Screen, chaos: FaultPlan | None = None, *, trace: bool = False
) -> RunReport:
    """Run the whole loop. Needs a Ray cluster.

    At the end, also after an error, `folder` has a ``report.json`` and a page, if the disk has room. `trace`
    adds a ``trace.json``, see `write_trace`.

    `chaos` is injected once all processes are connected. With faults, or with
    events in the recipe, the run ends after all heals.

    With ``resume: true``, the run continues after the version that an earlier, dead driver committed. A step
    interrupted by the driver's death is repeated. Raises StateError if trainers are gone.
    """
    loop = recipe.loop
    report = RunReport(name=recipe.name, seed=loop.seed, target_reward=loop.target_reward)
    healed: list[HealReport] = []
    updates: list[SyncReport] = []
    with screen.waiting(f"place {count_text(recipe.num_devices, 'device')}"):
        launcher = Launcher(recipe, folder.path / "model")
    report.devices = str(launcher)
    sync = WeightSync(recipe.sync, name=recipe.name if recipe.resume else None)
    policy = make_policy(recipe, sync, launcher.model)
    try:
        left = find_actors(recipe)
        if left:
            read_back(folder.path / "report.json", report)
        folder.write("report.json", report.write)
        healed += report.heals
        trainers, report.engines = start(recipe, launcher, policy, screen, launcher.engine, left)
        for name, info in report.engines.items():
            screen.line(f"engine {name}: {info['kind']} ({info['why']})")
        if chaos is not None:
            sync.inject(chaos)
        report.links = sync.links()
        screen.line(str(sync.plan.explain()))
        if left:
            served_by = ", ".join(sync.serving()) or "nobody"
            screen.line(f"taken over from a driver that died: version {sync.version}, served by {served_by}")
        if not policy.is_served:
            last = max([policy.version, *(row.version for row in report.steps)])
            with screen.waiting(f"version {last + 1}"):
                updates.append(policy.update(last + 1))
            screen.line(str(updates[-1]))
        report.coverage = sync.coverage()
        screen.line(coverage_table(report.coverage))
        report.steps = [row for row in report.steps if row.version <= policy.version]

        problems, seeds = ProblemSampler(loop.seed, loop.num_pairs), random.Random(loop.seed)
        for _ in range(1, policy.version):  # draw the numbers of the finished steps
            problems.sample(loop.prompts_per_step)
            for _ in recipe.engine_specs:
                seeds.getrandbits(32)
        elastic = Elastic(recipe, sync, launcher, screen)
        for step in range(policy.version, loop.steps + 1):
            elastic.before(step)
            prompts = problems.sample(loop.prompts_per_step)
            counted = count_drafts(recipe, sync.serving())
            with screen.waiting(f"step {step}/{loop.steps}"):
                rollouts = roll_out(prompts, sync.serving, loop, seeds, recipe.sync.timeout_s, policy.adapter)
                accepted = acceptance(counted, count_drafts(recipe, sync.serving()), rollouts.lost)
                for error in rollouts.lost.values():
                    screen.line(f"{error}; other engines took over the prompts")
                sleep(sync, recipe, screen)
                trained = train(rollouts.groups, trainers, recipe.sync.timeout_s)
                done, retried = update(policy, sync, step + 1, recipe, screen)
            updates.append(done)
            row = StepRow.of(step, rollouts.reward, rollouts.versions, done, retried, accepted, trained)
            report.steps.append(row)
            report.heals, report.spans, report.coverage = [*healed, *sync.heals], done.spans, sync.coverage()
            report.engines |= elastic.infos
            folder.write("report.json", report.write)
            screen.step(row, loop.steps)
        if chaos is not None or recipe.events:
            with screen.stage("waiting for heals"):
                elastic.wait_healed(recipe.engine_specs)
            report.engines |= elastic.infos
            report.coverage = sync.coverage()
            screen.line(f"served by {', '.join(sync.serving())}")
        report.status = "done" if report.final_reward >= loop.target_reward else "below target"
        report.heals = [*healed, *sync.heals]
        screen.summary(report)
    except BaseException as error:
        report.fail(error)
        raise
    finally:
        report.heals = [*healed, *sync.heals]
        folder.write("report.json", report.write)
        sync.close()
        launcher.close()
        if recipe.resume:
            end_all(recipe.name)
        leave(report, folder, updates if trace else None)
    return report
