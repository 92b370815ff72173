"""The command line: ``weightsync run RECIPE``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.cluster import existing_cluster, local_cluster
from recipes.recipe import Recipe, load_recipe
from recipes.screen import Screen
from weightsync.engines import choose_engine
from weightsync.errors import ConfigError, WeightSyncError, nearest
from weightsync.faults import FaultPlan

__all__ = ["app", "main"]

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
SHIPPED = Path(__file__).parent

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Moves a model's new weights from the processes that train it to the engines that serve it."""


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped recipe.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace one value.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME if not given.")] = None,
    chaos: Annotated[
        str | None, typer.Option(metavar="PLAN", help="Faults to inject: a YAML file, or a shipped plan.")
    ] = None,
) -> None:
    """Run a recipe. Exits with 0 when it did its work, 1 when it failed, 2 for bad input."""
    try:
        loaded = load_recipe(_find(recipe, "recipe", _shipped(plans=False)), set_ or [])
        for group, spec in loaded.engines.items():
            choose_engine(spec.kind, field=f"engines.{group}.kind")
        _check_cluster(loaded)
        faults = _load_plan(chaos, loaded) if chaos is not None else None
    except ConfigError as error:
        raise typer.Exit(_complain(error, BAD_INPUT)) from None
    raise typer.Exit(_execute(loaded, out or Path("runs") / loaded.name, faults))


def main() -> None:
    """The console script."""
    app()


def _check_cluster(recipe: Recipe) -> None:
    if recipe.resume and not existing_cluster():
        remedy = "a cluster has to outlive the driver: call ray start --head, and set RAY_ADDRESS=auto"
        raise ConfigError("resume", recipe.resume, remedy)


def _load_plan(chaos: str, recipe: Recipe) -> FaultPlan:
    plan = FaultPlan.from_yaml(_find(chaos, "chaos", _shipped(plans=True)))
    plan.check_who(recipe.members)
    return plan


def _shipped(*, plans: bool) -> dict[str, Path]:
    """Fault plans are called chaos…, every other file is a recipe."""
    return {file.stem: file for file in SHIPPED.glob("*.yaml") if file.stem.startswith("chaos") is plans}


def _find(given: str, field: str, shipped: Mapping[str, Path]) -> Path:
    path = Path(given)
    if path.suffix or path.exists():
        return path
    if given not in shipped:
        raise ConfigError(field, given, f"give a YAML file or a shipped name; {nearest(given, shipped)}")
    return shipped[given]


def _execute(recipe: Recipe, folder: Path, chaos: FaultPlan | None) -> int:
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _complain(ConfigError("--out", str(folder), str(error)), BAD_INPUT)
    num_at_once = max(recipe.trainers.count, len(recipe.engine_specs))
    threads = max(1, (os.cpu_count() or 1) // num_at_once)
    try:
        with local_cluster(folder / "logs", threads_per_actor=threads):
            return _run_inside(recipe, folder, chaos)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _run_inside(recipe: Recipe, folder: Path, chaos: FaultPlan | None) -> int:
    # Only now: see local_cluster; and bad input need not wait for torch and transformers.
    from recipes.quickstart import run as run_quickstart

    # Who ends a job by SIGTERM gets what Ctrl-C gets: actors closed, the report written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = run_quickstart(recipe, folder, Screen(Console()), chaos)
    except WeightSyncError as error:
        return _complain(f"{str(error).rstrip('.')}; logs are in {folder / 'logs'}", FAILED)
    if report.status != "done":
        remedy = f"the mean reward of the last steps is {report.final_reward:.3f}"
        return _complain(
            f"loop.target_reward {recipe.loop.target_reward:g} was not reached: {remedy}", FAILED
        )
    return DONE


def _complain(message: object, code: int) -> int:
    print(f"weightsync: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
