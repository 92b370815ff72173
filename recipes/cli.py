"""The command line: ``weightsync run RECIPE``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.cluster import local_cluster
from recipes.recipe import Recipe, load_recipe
from recipes.screen import Screen
from weightsync.engines import choose_engine
from weightsync.errors import ConfigError, WeightSyncError, nearest

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
) -> None:
    """Run a recipe. Exits with 0 when it did its work, 1 when it failed, 2 for bad input."""
    try:
        loaded = load_recipe(_find(recipe), set_ or [])
        for group, spec in loaded.engines.items():
            choose_engine(spec.kind, field=f"engines.{group}.kind")
    except ConfigError as error:
        raise typer.Exit(_complain(error, BAD_INPUT)) from None
    raise typer.Exit(_execute(loaded, out or Path("runs") / loaded.name))


def main() -> None:
    """The console script."""
    app()


def _find(recipe: str) -> Path:
    path = Path(recipe)
    if path.suffix or path.exists():
        return path
    shipped = {file.stem: file for file in SHIPPED.glob("*.yaml")}
    if recipe not in shipped:
        raise ConfigError(
            "recipe", recipe, f"give a YAML file or a shipped recipe; {nearest(recipe, shipped)}"
        )
    return shipped[recipe]


def _execute(recipe: Recipe, folder: Path) -> int:
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _complain(ConfigError("--out", str(folder), str(error)), BAD_INPUT)
    num_at_once = max(recipe.trainers.count, len(recipe.engine_specs))
    threads = max(1, (os.cpu_count() or 1) // num_at_once)
    try:
        with local_cluster(folder / "logs", threads_per_actor=threads):
            return _run_inside(recipe, folder)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _run_inside(recipe: Recipe, folder: Path) -> int:
    # Only now: see local_cluster; and bad input need not wait for torch and transformers.
    from recipes.quickstart import run as run_quickstart

    # Who ends a job by SIGTERM gets what Ctrl-C gets: actors closed, the report written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = run_quickstart(recipe, folder, Screen(Console()))
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
