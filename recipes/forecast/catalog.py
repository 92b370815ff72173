"""Loads models and clusters described in YAML: files by path, shipped ones by name."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weightsync.config import load_dataclass
from weightsync.errors import ConfigError, nearest
from weightsync.recipes.config.yaml_lines import located, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def shipped(kind: str) -> dict[str, Path]:
    """Return the files of ``configs/<kind>`` by name, from a checkout or an installation."""
    homes = (Path(__file__).resolve().parents[2], Path(sysconfig.get_path("data")) / "share" / "weightsync")
    home = next((home for home in homes if (home / "configs" / kind).is_dir()), homes[0])
    return {file.stem: file for file in sorted((home / "configs" / kind).glob("*.yaml"))}


def find(given: str, field: str, known: Mapping[str, Path]) -> Path:
    """Return the file at path `given`, or the `known` one of that name.

    Raises:
        ConfigError: `given` is neither; names the nearest.
    """
    if given in known:
        return known[given]
    path = Path(given)
    if path.suffix in (".yaml", ".yml") or os.path.exists(path):
        return path
    raise ConfigError(field, given, f"give a YAML file or a shipped name; {nearest(given, known)}")


def load(cls: type[T], given: str, *, field: str, kind: str) -> T:
    """Load a `cls` from a YAML file, or from the shipped ``configs/<kind>/<given>.yaml``.

    Raises:
        ConfigError: there is no such file, or it does not describe a `cls`.
    """
    path = find(given, field, shipped(kind))
    data, lines = read_yaml(path, field)
    # Checks name fields by kind, such as model.head_dim, so register lines under both names.
    places = {f"{name}.{key}": at for name in (field, kind[:-1]) for key, at in lines.items()}
    with located(places, str(path)):
        return load_dataclass(cls, data, field=field)
