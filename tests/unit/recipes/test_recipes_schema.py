"""The schema that editors get, against the loader that decides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from weightsync.config import SyncConfig
from weightsync.errors import ConfigError
from weightsync.recipes import cli
from weightsync.recipes.config.recipe import EngineSpec, LoopSpec, ModelSpec, MoeSpec, Recipe, TrainerSpec
from weightsync.recipes.config.schema import field_docs, recipe_schema
from weightsync.recipes.config.yaml_lines import read_yaml

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if not path.stem.startswith("chaos"))
VALIDATOR = Draft202012Validator(recipe_schema())
# What the loader says of a key or a type; limits, and what has to fit together, are its own affair.
STRUCTURE = re.compile(
    "the key is unknown|it is required|give a (whole number|mapping|list|number;)|give true or false"
    "|give a text, in quotes|did you mean|valid: |as a number or a text such"
)


def structurally_wrong() -> Iterator[tuple[str, object]]:
    for path in sorted((ROOT / "tests/bad_recipes").glob("*.yaml")):
        remedy = path.read_bytes().partition(b"\n")[0].decode().partition(" is not valid; ")[2]
        if STRUCTURE.search(remedy) and path.stem not in ("event_of_nobody", "deployment_of_one"):
            try:
                yield path.stem, read_yaml(path, "recipe")[0]
            except ConfigError:
                continue


WRONG = dict(structurally_wrong())


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_and_says_where_the_schema_is(path: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(read_yaml(path, "recipe")[0])] == []
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = re.fullmatch(r"# yaml-language-server: \$schema=(.+)", first)
    assert named
    assert (path.parent / named[1]).is_file()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_structurally_wrong_is_refused(name: str) -> None:
    assert not VALIDATOR.is_valid(WRONG[name])


def test_that_is_most_of_them() -> None:
    assert len(WRONG) >= 25


@pytest.mark.parametrize("size", [4096, "4096", "256MiB", "1.5 GB", "7B"])
def test_sizes_are_what_the_loader_takes(size: object) -> None:
    recipe = {"name": "x", "engines": {"main": {}}, "sync": {"bucket_bytes": size}}
    assert VALIDATOR.is_valid(recipe)


@pytest.mark.parametrize(
    ("ports", "fits"),
    [("29600-29699", True), ([29600, 29699], True), (None, True), (29600, False), ([29600], False)],
)
def test_ranges_of_ports_are_what_the_loader_takes(ports: object, fits: bool) -> None:
    recipe = {"name": "x", "engines": {"main": {}}, "sync": {"ports": ports}}
    assert VALIDATOR.is_valid(recipe) == fits


def test_every_key_is_explained() -> None:
    def unexplained(schema: dict[str, Any], path: str) -> Iterator[str]:
        for name, each in schema.get("properties", {}).items():
            if not each.get("description"):
                yield f"{path}{name}"
            for inner in (each, *each.get("anyOf", ()), each.get("additionalProperties"), each.get("items")):
                if isinstance(inner, dict):
                    yield from unexplained(inner, f"{path}{name}.")

    assert [*unexplained(recipe_schema(), "")] == []


@pytest.mark.parametrize("cls", [Recipe, EngineSpec, LoopSpec, ModelSpec, MoeSpec, TrainerSpec, SyncConfig])
def test_what_is_explained_is_a_key(cls: type[Recipe]) -> None:
    assert field_docs(cls).keys() <= cls.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    ("arguments", "file"),
    [(["schema"], "recipes/recipe.schema.json"), (["schema", "--markdown"], "docs/configuration.md")],
)
def test_what_is_shipped_is_what_is_made(arguments: list[str], file: str) -> None:
    made = CliRunner().invoke(cli.app, arguments)
    assert made.exit_code == 0
    remedy = f"weightsync {' '.join(arguments)} > {file}"
    assert (ROOT / file).read_text(encoding="utf-8") == made.stdout, remedy


def test_the_schema_is_json() -> None:
    assert json.loads(CliRunner().invoke(cli.app, ["schema"]).stdout) == recipe_schema()
