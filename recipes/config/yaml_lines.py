"""Reads YAML files and records the line of every value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from weightsync.errors import ConfigError


def read_yaml(path: Path, field: str) -> tuple[object, dict[str, str]]:
    """Return the value, and the places ``{"sync.timeout_s": "recipes/x.yaml:12", "faults[0]": …}``.

    Raises:
        ConfigError: of `field`, with the line: the file cannot be read or is not YAML, or a key is given
            twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(field, str(path), f"give a YAML file; {error.strerror}") from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start].count(b"\n")
        byte = error.object[error.start : error.start + 1]
        raise ConfigError(field, byte, "save the file as UTF-8", f"{path}:{before + 1}") from error
    lines: dict[str, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        for key, line, value in _keys(node, "", set()):
            if key in lines:
                remedy = f"line {lines[key]} has it already: keep one of them"
                raise ConfigError(key, value, remedy, f"{path}:{line}")
            lines[key] = line
        data = loader.construct_document(node) if node else None
    except (yaml.YAMLError, RecursionError) as error:
        raise _no_yaml(error, text, path, field) from error
    return data, {key: f"{path}:{line}" for key, line in lines.items()}


@contextmanager
def located(places: Mapping[str, str], otherwise: str) -> Iterator[None]:
    """Add the place of the field, or `otherwise`, to each ConfigError raised inside.

    If the field is not in the file, the place of a field in the remedy, or of the parent, is added.
    """
    try:
        yield
    except ConfigError as error:
        named = [word.strip(".") for word in re.findall(r"[\w.-]+", error.remedy)]
        parents = [error.field[: dot.start()] for dot in re.finditer(r"[.\[]", error.field)]
        known = (places[key] for key in (error.field, *named, *reversed(parents)) if key in places)
        raise ConfigError(error.field, error.value, error.remedy, next(known, otherwise)) from error


def _keys(node: yaml.Node | None, path: str, seen: set[int]) -> Iterator[tuple[str, int, object]]:
    """Yield key, line and literal value. Keys of list items are ``key[0]`` and so on."""
    if id(node) in seen:
        return  # an alias, whose anchor was visited before
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = f"{path}.{key.value}" if path else key.value
                yield name, key.start_mark.line + 1, _written(value)
                yield from _keys(value, name, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{path}[{index}]", item.start_mark.line + 1, _written(item)
            yield from _keys(item, f"{path}[{index}]", seen)


def _written(node: yaml.Node) -> object:
    return (
        node.value if isinstance(node, yaml.ScalarNode) else {} if isinstance(node, yaml.MappingNode) else []
    )


def _no_yaml(error: Exception, text: str, path: Path, field: str) -> ConfigError:
    """Return an error that quotes the line unchanged, since blanks may be wrong."""
    lines = [*text.splitlines(), ""]
    index, problem = 0, "it is nested too deep"
    if isinstance(error, yaml.MarkedYAMLError):
        marks = (error.problem_mark, error.context_mark)  # the second is where an unclosed item starts
        index = next((mark.line for mark in marks if mark and lines[mark.line].strip()), 0)
        problem = str(error.problem)
    elif isinstance(error, yaml.reader.ReaderError):
        index, problem = text[: error.position].count("\n"), error.reason
    remedy = "indent with blanks, YAML takes no tabs" if "\\t" in problem else f"give YAML; {problem}"
    return ConfigError(field, lines[index], remedy, f"{path}:{index + 1}")
