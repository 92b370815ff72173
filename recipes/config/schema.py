"""Makes recipes' JSON Schema and Markdown reference from the dataclasses that load them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from weightsync.config import are_ports, is_size
from weightsync.recipes.config.recipe import Recipe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Schema = dict[str, Any]

_SCALARS = {int: "integer", float: "number", bool: "boolean", str: "string"}
_SIZE: Schema = {
    "title": "size",
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\d+(\.\d+)? ?([KMGT]i?B|kB|B)?$"},
    ],
}
_PORTS: Schema = {
    "title": "range of ports",
    "anyOf": [
        {"type": "string", "pattern": r"^\d+ ?- ?\d+$"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    ],
}
_HEAD = """# What a recipe may say

Made by `weightsync schema --markdown` from the classes that load recipes; `weightsync schema` makes the JSON
Schema by which editors complete and check them, [recipe.schema.json](../recipes/recipe.schema.json). A recipe
that is shipped names it in its first line.

A size is a whole number of bytes, or a text such as `256MiB` (1024s) or `2GB` (1000s). A range
of ports is a text such as `29600-29699`, or a list of the first and the last port. Keys that are not listed
are mistakes."""


def recipe_schema() -> Schema:
    """Return a JSON Schema, draft 2020-12. The loader checks limits of numbers and combinations."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe", **_object(Recipe)}


def field_docs(cls: type) -> dict[str, str]:
    """Return each field's text under ``Attributes:`` in the docstring, as Markdown lines."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    own = re.split(r"\n(?=\S)", section)[0]
    entries = re.findall(r"^    ([\w, ]+): (.+(?:\n {8}.+)*)", own, re.MULTILINE)
    return {name: _one_line(text) for names, text in entries for name in names.split(", ")}


def markdown(schema: Schema) -> str:
    """Return a section for each mapping in `schema`, with a row for each key."""
    parts = [_HEAD]
    for path, section in _sections(schema, ""):
        parts += ["", f"## {f'`{path}`' if path else 'A recipe'}", "", section["description"], ""]
        parts += ["| key | is | default | says |", "|---|---|---|---|"]
        required = section.get("required", ())
        parts += [_row(name, each, name in required) for name, each in section["properties"].items()]
    return "\n".join(parts) + "\n"


def _object(cls: type[DataclassInstance]) -> Schema:
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls)
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    properties = {}
    for each in fields(cls):
        said = {"description": docs[each.name]} if each.name in docs else {}
        default = {} if each.default in (MISSING, None, ()) else {"default": each.default}
        properties[each.name] = said | _of(hints[each.name]) | default
    return {
        "type": "object",
        "description": _one_line(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]),
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _of(hint: object) -> Schema:
    """The schema of a type, as `weightsync.config.load_dataclass` accepts it."""
    origin, args = get_origin(hint), get_args(hint)
    if are_ports(hint):
        return dict(_PORTS)
    if origin is Annotated:
        return dict(_SIZE) if is_size(hint) else _of(args[0])
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, UnionType):
        return {"anyOf": [{"type": "null"} if arg is NoneType else _of(arg) for arg in args]}
    if origin in (dict, Mapping):
        keys = {"propertyNames": _of(args[0])} if get_args(args[0]) else {}
        return {"type": "object", **keys, "additionalProperties": _of(args[1])}
    if origin is tuple:
        return {"type": "array", "items": _of(args[0])}
    if isinstance(hint, type) and is_dataclass(hint):
        return _object(hint)
    assert hint in _SCALARS, f"the schema does not know {hint}"
    return {"type": _SCALARS[hint]}


def _one_line(text: str) -> str:
    """Join a docstring's lines as Markdown: single backticks, no roles."""
    return re.sub(r":\w+:(?=`)", "", " ".join(text.split())).replace("``", "`")


def _sections(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield path and schema of each mapping with named keys. Paths are ``engines.<name>``, ``events[]``."""
    if "properties" in schema:
        yield path, schema
        for name, each in schema["properties"].items():
            yield from _sections(each, f"{path}.{name}".lstrip("."))
    for each in schema.get("anyOf", ()):
        yield from _sections(each, path)
    if schema.get("additionalProperties"):
        yield from _sections(schema["additionalProperties"], f"{path}.<name>")
    if "items" in schema:
        yield from _sections(schema["items"], f"{path}[]")


def _row(name: str, schema: Schema, required: bool) -> str:
    shown = _shown(schema) if "default" in schema else "has to be given" if required else ""
    says = schema.get("description", "").replace("|", "\\|")
    return f"| `{name}` | {_kind(schema)} | {shown} | {says} |"


def _shown(schema: Schema) -> str:
    value = schema["default"]
    if schema.get("title") == "size":
        power = max(power for power in range(4) if value % 1024**power == 0)
        return f"`{value // 1024**power}{('', 'KiB', 'MiB', 'GiB')[power]}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"


def _kind(schema: Schema) -> str:
    if "title" in schema:
        return str(schema["title"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    names = {"integer": "whole number", "boolean": "true or false", "string": "text", "null": "nothing"}
    names |= {"number": "number", "object": "mapping", "array": "list"}
    return names[schema["type"]]
