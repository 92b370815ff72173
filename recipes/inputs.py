"""Checks command-line input before anything is started.

All functions raise ConfigError, which names the option, or the file, line and field, its value and a remedy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from weightsync.engines import choose_engine
from weightsync.errors import ConfigError, nearest
from weightsync.faults import FaultPlan
from weightsync.recipes.cluster import existing_cluster
from weightsync.recipes.config.recipe import Recipe, load_recipe
from weightsync.recipes.config.yaml_lines import located, read_yaml
from weightsync.recipes.forecast.catalog import find
from weightsync.recipes.forecast.forecast import PlannedEngine
from weightsync.recipes.forecast.parallel import EngineParallel
from weightsync.recipes.forecast.quantised import read_quantization
from weightsync.sources.checkpoint.safetensors_files import contents
from weightsync.text import count_text

SHIPPED = Path(__file__).resolve().parent
_MOST_ENGINE_RANKS = 1_000_000


def runnable_recipe(given: str, overrides: Sequence[str]) -> Recipe:
    """Load a recipe by path or name, if this machine can start the trainers and engines."""
    recipe = load_recipe(recipe_file(given), overrides)
    kind = recipe.trainers.kind
    library = {"deepspeed": "DeepSpeed", "megatron": "Megatron-Core"}.get(kind)
    if library and not find_spec(kind):
        remedy = f"{library} is not installed: pip install 'weightsync[{kind}]', or use kind: fsdp2"
        raise ConfigError("trainers.kind", kind, remedy)
    if recipe.trainers.lora and not find_spec("peft"):
        remedy = "PEFT is not installed: pip install 'weightsync[peft]'"
        raise ConfigError("trainers.lora.rank", recipe.trainers.lora.rank, remedy)
    for group, spec in recipe.engines.items():
        at = f"engines.{group}"
        if (recipe.trainers.lora or recipe.draft) and not find_spec("vllm"):
            remedy = "vLLM serves adapters and drafts, and is not installed: pip install 'weightsync[vllm]'"
            raise ConfigError(f"{at}.kind", spec.kind, remedy)
        check_ranks(f"{at}.kind", spec.kind, f"{at}.tensor_parallel_size", spec.tensor_parallel_size)
    return recipe


def check_cluster(recipe: Recipe) -> None:
    """Raise ConfigError for a recipe with `resume` if there is no existing cluster."""
    if recipe.resume and not existing_cluster():
        remedy = "a cluster has to outlive the driver: call ray start --head, and set RAY_ADDRESS=auto"
        raise ConfigError("resume", recipe.resume, remedy)


def recipe_file(given: str) -> Path:
    """Find a recipe by path or shipped name. ``recipes/NAME.yaml`` works in a job's empty folder too."""
    known, path = shipped_recipes(plans=False), Path(given)
    if path.parts[:-1] == (SHIPPED.name,) and not os.path.exists(path) and path.stem in known:
        return known[path.stem]
    return find(given, "recipe", known)


def check_ranks(kind_field: str, kind: str, field: str, num_ranks: int) -> None:
    """Raise ConfigError if a torch engine, chosen or by default, should have several ranks."""
    if choose_engine(kind, field=kind_field)[0] == "torch" and num_ranks > 1:
        raise ConfigError(field, num_ranks, "install vllm; a torch engine has one rank")


def check_models(models: Sequence[Path]) -> None:
    """Raise ConfigError unless models can be served and differ in name. Reads every file's header."""
    for index, model in enumerate(models):
        if not (model / "config.json").is_file():
            raise ConfigError("PATH", str(model), "give a folder with a config.json and safetensors files")
        if model.name in [other.name for other in models[:index]]:
            raise ConfigError(
                "PATH", str(model), f"another one is called {model.name}: rename one of the two"
            )
        contents([str(model)])


def load_fault_plan(chaos: str, recipe: Recipe) -> FaultPlan:
    """Load a fault plan by path or name, if `recipe` has the processes."""
    path = find(chaos, "chaos", shipped_recipes(plans=True))
    places = {f"chaos.{key}": at for key, at in read_yaml(path, "chaos")[1].items()}
    with located(places, str(path)):
        if recipe.trainers.lora:
            raise ConfigError("--chaos", chaos, "leave it out: faults go into updates of models")
        plan = FaultPlan.from_yaml(path)
        plan.check_processes(recipe.members)
    return plan


def report_in(folder: Path) -> Path:
    """Return the report in `folder`. The error names the nearest folder that has one."""
    path = folder / "report.json"
    if not os.path.isfile(path):
        others = [each.parent.name for each in folder.parent.glob("*/report.json")]
        hint = f"; {nearest(folder.name, others)}" if others else ""
        raise ConfigError("DIR", str(folder), f"give the folder of a run{hint}")
    return path


def refuse(options: Mapping[str, object], remedy: str) -> None:
    """Raise ConfigError if any of these options is given."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(option, value, remedy)


def required(option: str, value: str | None) -> str:
    """Return an option that `plan` needs, or raise ConfigError."""
    if value is None:
        raise ConfigError(option, value, "give RECIPE, or --model, --trainers and --engine")
    return value


def at_least_one(option: str, value: int | None) -> int:
    """Return an option of at least 1, which is also the default."""
    if value is not None and value < 1:
        raise ConfigError(option, value, "give at least 1")
    return value or 1


def many_engines(engine: EngineParallel, count: int | None, quantization: str | None) -> list[PlannedEngine]:
    """Return `count` engines, 1 by default. Refuses more than can be planned within seconds."""
    given, most = at_least_one("--engines", count), _MOST_ENGINE_RANKS // engine.num_ranks
    if given > most:
        ranks = count_text(engine.num_ranks, "rank")
        remedy = f"give at most {most}: engines of {ranks} are planned up to a million ranks"
        raise ConfigError("--engines", given, remedy)
    read = read_quantization(quantization) if quantization else None
    return [PlannedEngine(f"engine-{number}", engine, read) for number in range(given)]


def writable(option: str, path: Path) -> None:
    """Check that a file can be written later, and make the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(option, str(path), f"give a file in a folder: {error}") from error
    if path.is_dir():
        raise ConfigError(option, str(path), "it is a folder: give a file")


def shipped_recipes(*, plans: bool) -> dict[str, Path]:
    """Return shipped fault plans, which start with chaos, or else the recipes."""
    return {file.stem: file for file in SHIPPED.glob("*.yaml") if file.stem.startswith("chaos") is plans}
