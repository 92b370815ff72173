from __future__ import annotations

from pathlib import Path

import pytest

import weightsync.recipes
from weightsync.errors import ConfigError
from weightsync.recipes.config.recipe import EngineSpec, Recipe, load_recipe

FILES = sorted(Path(weightsync.recipes.__file__).parent.glob("*.yaml"))
SHIPPED = [path for path in FILES if not path.stem.startswith("chaos")]


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, "name: small\nengines: {main: {kind: torch, count: 2}, spare: {}}\n")


def test_recipes_are_shipped() -> None:
    assert "quickstart" in [path.stem for path in SHIPPED]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_under_its_own_name(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_engines_are_named_by_their_group(minimal: Path) -> None:
    names = load_recipe(minimal).engine_specs
    assert list(names) == ["main-0", "main-1", "spare-0"]
    assert names["main-1"] == EngineSpec(kind="torch", count=2)


def test_a_deployment_has_the_engines_of_all_groups_that_name_it(tmp_path: Path) -> None:
    groups = "{prefill: {count: 2, deployment: pd}, decode: {deployment: pd}, alone: {}}"
    recipe = load_recipe(write(tmp_path, f"name: small\nengines: {groups}\n"))
    assert recipe.deployments == {"pd": ("prefill-0", "prefill-1", "decode-0")}


def test_the_members_are_those_that_run(minimal: Path) -> None:
    names = ["trainer 0", "trainer 1", "engine main-0", "engine main-1", "engine spare-0"]
    shared = load_recipe(minimal)
    assert list(shared.members) == [*names, "holder 0", "holder 1", "holder 2"]
    apart = load_recipe(minimal, ["placement=disaggregated"])
    assert list(apart.members) == [*names, *(f"holder {i}" for i in range(5))]


def test_ranks_and_trainers_are_seated_one_behind_another(tmp_path: Path) -> None:
    groups = "{wide: {kind: vllm, tensor_parallel_size: 2}, narrow: {kind: torch}}"
    path = write(tmp_path, f"name: small\nengines: {groups}\n")
    shared = load_recipe(path)
    assert shared.devices == {
        "trainer 0": (0,),
        "trainer 1": (1,),
        "engine wide-0": (0, 1),
        "engine narrow-0": (2,),
    }
    # As an engine's actor calls those of its ranks, so that the trainer there shares the holder.
    assert shared.slots == {0: "0", 1: "0.1", 2: "2"}
    apart = load_recipe(path, ["placement=disaggregated", "trainers.count=1"])
    assert apart.devices == {"trainer 0": (0,), "engine wide-0": (1, 2), "engine narrow-0": (3,)}
    assert apart.slots == {0: "0", 1: "1", 2: "1.1", 3: "3"}
    assert apart.num_devices == 4


def test_resuming_has_to_be_asked_for(minimal: Path) -> None:
    assert load_recipe(minimal).resume is False
    assert load_recipe(minimal, ["resume=true"]).resume is True


def test_overrides_are_laid_over_the_file(minimal: Path) -> None:
    given = [
        "engines.main.count=4",
        "sync.bucket_bytes=1MiB",
        "loop.learning_rate=1.0e-4",
        "sync.pause=wait",
    ]
    recipe = load_recipe(minimal, given)
    assert recipe.engines["main"].count == 4
    assert recipe.sync.bucket_bytes == 1 << 20
    assert recipe.loop.learning_rate == 1e-4
    assert recipe.sync.pause == "wait"
    assert recipe.engines["spare"] == EngineSpec()


def test_an_override_may_turn_the_model_into_a_mixture(minimal: Path) -> None:
    moe = "{num_experts: 4, num_experts_per_tok: 2, intermediate_size: 64}"
    model = load_recipe(minimal, [f"model.moe={moe}"]).model
    assert model.moe is not None
    assert model.moe.num_experts == 4


def test_no_override_changes_nothing(minimal: Path) -> None:
    assert load_recipe(minimal, ["name=small"]) == load_recipe(minimal)


@pytest.mark.parametrize(
    ("text", "field", "value", "remedy"),
    [
        ("name: x\nengines: {}", "engines", {}, "at least one group"),
        ("name: x", "engines", None, "required"),
        ("name: x\nengines: {main: {count: 0}}", "engines.main.count", 0, "at least 1"),
        ("name: x\nengines: {main: {count: two}}", "engines.main.count", "two", "whole number"),
        ("name: x\nengines: {main: {cuont: 2}}", "engines.main.cuont", 2, "'count'"),
        ("name: x\nengines: {main: {kind: vlm}}", "engines.main.kind", "vlm", "'vllm'"),
        (
            "name: x\nengines: {main: {tensor_parallel_size: 0}}",
            "engines.main.tensor_parallel_size",
            0,
            "at least 1",
        ),
        ("nmae: x", "nmae", "x", "'name'"),
        ("name: ../x\nengines: {main: {}}", "name", "../x", "folder"),
        ("name: x\nengines: {main: {}}\nplacement: apart", "placement", "apart", "colocated"),
        ("name: x\nengines: {main: {}}\ntrainers: {count: 0}", "trainers.count", 0, "at least 1"),
        ("name: x\nengines: {main: {}}\ntrainers: {count: 3}", "loop.prompts_per_step", 128, "multiple of"),
        ("name: x\nengines: {main: {}}\nsync: {bucket_bytes: 256Mb}", "sync.bucket_bytes", "256Mb", "256MiB"),
        ("name: x\nengines: {main: {}}\nsync: {min_engines: 2}", "sync.min_engines", 2, "only 1"),
        ("name: x\nengines: {main: {}}\nmodel: {vocab_size: 100}", "model.vocab_size", 100, "multiple of 64"),
        ("name: x\nengines: {main: {}}\nmodel: {head_dim: 16}", "model.head_dim", 16, "32, 64 or 128"),
        ("name: x\nengines: {main: {}}\nloop: {clip: -1.0}", "loop.clip", -1.0, "above 0"),
        ("name: x\nengines: {main: {}}\nloop: {clip: .nan}", "loop.clip", None, "above 0"),
        ("name: x\nengines: {main: {}}\nloop: {group_size: 1}", "loop.group_size", 1, "at least 2"),
        ("name: x\nengines: {main: {}}\nloop: {target_reward: 80}", "loop.target_reward", 80.0, "0 to 1"),
        ("name: x\nengines: {main: {}}\nresume: maybe", "resume", "maybe", "true or false"),
        ("- a list", "top level", ["a list"], "mapping"),
    ],
)
def test_a_mistake_names_field_value_and_remedy(
    tmp_path: Path, text: str, field: str, value: object, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text))
    assert caught.value.field == field
    assert caught.value.value == value or value is None
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("override", "field", "remedy"),
    [
        ("engines.mian.count=2", "--set", "'main'"),
        ("loop.stepz=2", "--set", "'steps'"),
        ("loop.steps.more=2", "--set", "'more' is unknown"),
        ("loop.steps", "--set", "key=value"),
        ("loop.steps=many", "loop.steps", "whole number"),
        ("loop.steps=[1", "loop.steps", "YAML"),
        ("engines.main.count=0", "engines.main.count", "at least 1"),
    ],
)
def test_a_wrong_override_is_refused(minimal: Path, override: str, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(minimal, [override])
    assert caught.value.field == field
    assert remedy in caught.value.remedy


def test_the_engine_groups_must_be_given() -> None:
    with pytest.raises(ConfigError, match="engines"):
        Recipe(name="x", engines={})
