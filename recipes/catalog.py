"""Models and clusters that are described by data: YAML files by path, or shipped ones by name."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weightsync.config import load_dataclass
from weightsync.errors import ConfigError, nearest
from weightsync.recipes.yaml_lines import located, read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["find", "load", "shipped"]

T = TypeVar("T", bound="DataclassInstance")


def shipped(kind: str) -> dict[str, Path]:
    """The files of ``configs/<kind>`` by name, in a checkout or where an installation puts them."""
    homes = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("data")) / "share" / "weightsync")
    home = next((home for home in homes if (home / "configs" / kind).is_dir()), homes[0])
    return {file.stem: file for file in sorted((home / "configs" / kind).glob("*.yaml"))}


def find(given: str, field: str, known: Mapping[str, Path]) -> Path:
    """The file that `given` is the path of, or that is `known` by that name.

    Raises:
        ConfigError: it is neither; names the nearest.
    """
    if given in known:
        return known[given]
    path = Path(given)
    if path.suffix in (".yaml", ".yml") or path.exists():
        return path
    raise ConfigError(field, given, f"give a YAML file or a shipped name; {nearest(given, known)}")


def load(cls: type[T], given: str, *, field: str, kind: str) -> T:
    """`cls` from a YAML file, or from the file that is shipped as ``configs/<kind>/<given>.yaml``.

    Raises:
        ConfigError: there is no such file, or what it says is no `cls`.
    """
    path = find(given, field, shipped(kind))
    data, lines = read_yaml(path, field)
    # What checks a value calls it by what it is, as model.head_dim.
    places = {f"{name}.{key}": at for name in (field, kind[:-1]) for key, at in lines.items()}
    with located(places, str(path)):
        return load_dataclass(cls, data, field=field)
