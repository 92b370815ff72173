"""What the command line was given, checked before anything is started.

All raise ConfigError, which names the option, or the file, line and field, with its value and a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weightsync.engines import choose_engine
from weightsync.errors import ConfigError, nearest
from weightsync.faults import FaultPlan
from weightsync.plan.explain import count_text
from weightsync.recipes.catalog import find
from weightsync.recipes.cluster import existing_cluster
from weightsync.recipes.parallel import EngineParallel
from weightsync.recipes.recipe import Recipe, load_recipe
from weightsync.recipes.yaml_lines import located, read_yaml
from weightsync.sources.safetensors_files import contents

__all__ = [
    "SHIPPED",
    "at_least_one",
    "check_cluster",
    "check_models",
    "check_ranks",
    "load_fault_plan",
    "many_engines",
    "recipe_file",
    "refuse",
    "report_in",
    "required",
    "runnable_recipe",
    "shipped_recipes",
    "writable",
]

SHIPPED = Path(__file__).resolve().parent
_MOST_ENGINE_RANKS = 1_000_000


def runnable_recipe(given: str, overrides: Sequence[str]) -> Recipe:
    """A recipe by its path or name, whose engines this machine can start."""
    recipe = load_recipe(recipe_file(given), overrides)
    _check_engines(recipe)
    return recipe


def check_cluster(recipe: Recipe) -> None:
    """What is to be resumed needs a cluster that is there already."""
    if recipe.resume and not existing_cluster():
        remedy = "a cluster has to outlive the driver: call ray start --head, and set RAY_ADDRESS=auto"
        raise ConfigError("resume", recipe.resume, remedy)


def recipe_file(given: str) -> Path:
    """By its path or by a shipped one's name; ``recipes/NAME.yaml`` also where a job's folder is empty."""
    known, path = shipped_recipes(plans=False), Path(given)
    if path.parts[:-1] == (SHIPPED.name,) and not path.exists() and path.stem in known:
        return known[path.stem]
    return find(given, "recipe", known)


def check_ranks(kind_field: str, kind: str, field: str, num_ranks: int) -> None:
    """A torch engine, asked for or all there is, has one."""
    if choose_engine(kind, field=kind_field)[0] == "torch" and num_ranks > 1:
        raise ConfigError(field, num_ranks, "install vllm; a torch engine has one rank")


def check_models(models: Sequence[Path]) -> None:
    """They can be served, and told apart by their names; every file's header is looked at."""
    for index, model in enumerate(models):
        if not (model / "config.json").is_file():
            raise ConfigError("PATH", str(model), "give a folder with a config.json and safetensors files")
        if model.name in [other.name for other in models[:index]]:
            raise ConfigError(
                "PATH", str(model), f"another one is called {model.name}: rename one of the two"
            )
        contents([str(model)])


def load_fault_plan(chaos: str, recipe: Recipe) -> FaultPlan:
    """By its path or name; of processes that `recipe` has."""
    path = find(chaos, "chaos", shipped_recipes(plans=True))
    places = {f"chaos.{key}": at for key, at in read_yaml(path, "chaos")[1].items()}
    with located(places, str(path)):
        plan = FaultPlan.from_yaml(path)
        plan.check_who(recipe.members)
    return plan


def report_in(folder: Path) -> Path:
    """What a run wrote into `folder`; names the nearest folder that has one."""
    path = folder / "report.json"
    if not path.is_file():
        beside = [each.parent.name for each in folder.parent.glob("*/report.json")]
        hint = f"; {nearest(folder.name, beside)}" if beside else ""
        raise ConfigError("DIR", str(folder), f"give the folder of a run{hint}")
    return path


def refuse(options: Mapping[str, object], remedy: str) -> None:
    """None of these may be given."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(option, value, remedy)


def required(option: str, value: str | None) -> str:
    """What `plan` cannot do without."""
    if value is None:
        raise ConfigError(option, value, "give RECIPE, or --model, --trainers and --engine")
    return value


def at_least_one(option: str, value: int | None) -> int:
    """1 if it was not given."""
    if value is not None and value < 1:
        raise ConfigError(option, value, "give at least 1")
    return value or 1


def many_engines(engine: EngineParallel, count: int | None) -> tuple[EngineParallel, ...]:
    """`count` of them, 1 if it was not given, as far as they can be planned within seconds."""
    given, most = at_least_one("--engines", count), _MOST_ENGINE_RANKS // engine.num_ranks
    if given > most:
        ranks = count_text(engine.num_ranks, "rank")
        remedy = f"give at most {most}: engines of {ranks} are planned up to a million ranks"
        raise ConfigError("--engines", given, remedy)
    return (engine,) * given


def writable(option: str, path: Path) -> None:
    """A file that can be written later; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(option, str(path), f"give a file in a folder: {error}") from error
    if path.is_dir():
        raise ConfigError(option, str(path), "it is a folder: give a file")


def shipped_recipes(*, plans: bool) -> dict[str, Path]:
    """Fault plans are called chaos…, every other file is a recipe."""
    return {file.stem: file for file in SHIPPED.glob("*.yaml") if file.stem.startswith("chaos") is plans}


def _check_engines(recipe: Recipe) -> None:
    for group, spec in recipe.engines.items():
        at = f"engines.{group}"
        check_ranks(f"{at}.kind", spec.kind, f"{at}.tensor_parallel_size", spec.tensor_parallel_size)
