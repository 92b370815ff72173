"""Makes docs/api.md from the signatures and docstrings of `weightsync.__all__`.

bash scripts/api
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import weightsync
from weightsync import experts

PAGE = Path(__file__).parents[1] / "docs/api.md"
HEAD = """# API

Made by `bash scripts/api` from docstrings. Import these names from `weightsync`, or `experts.…` from
`weightsync.experts`; anything else may move.
Methods whose names begin with `sync_` are called by `WeightSync` and are left out.
"""
SECTION = re.compile(r"(Args|Attributes|Returns|Raises):$")
ITEM = re.compile(r"    (\w[\w, ]*): (.*)")
WIDTH = 100
HIDDEN = ("self", "_ray_trace_ctx")
"""Ray adds the second to methods of a class that was made an actor."""


class _Bare(str):
    """An annotation that is printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(name: str, thing: object) -> str:
    """Return the signature as a fenced block: one line, or one line per parameter."""
    if isinstance(thing, property):
        return f"```\n{name}: {inspect.signature(thing.fget).return_annotation}\n```"  # type: ignore[arg-type]
    if inspect.isclass(thing) and "__init__" not in vars(thing) and issubclass(thing, Exception):
        return f"```\n{name}(message: str)\n```"
    found = inspect.signature(thing)  # type: ignore[arg-type]
    params = [each for each in found.parameters.values() if each.name not in HIDDEN]
    bare = [each.replace(annotation=_Bare(each.annotation)) for each in params]
    returns = "" if inspect.isclass(thing) else f" -> {found.return_annotation}"
    text = str(inspect.Signature(bare))
    if len(name + text + returns) > WIDTH:
        text = "(\n    " + re.sub(r", (?=\*|\w+: )", ",\n    ", text[1:-1]) + ",\n)"
    return f"```\n{name}{text}{returns}\n```"


def markdown(docstring: str | None) -> list[str]:
    """Convert a docstring to lines of Markdown: sections become lists, indented code is fenced."""
    lines: list[str] = []
    in_section = in_code = False
    for line in [*inspect.cleandoc(docstring or "").replace("``", "`").split("\n"), ""]:
        code = not in_section and line.startswith("    ")
        if code and not in_code:
            lines.append("```")
        elif in_code and not line and lines[-1] != "```":
            lines.append("```")
            code = False
        in_code = code
        if SECTION.match(line):
            in_section = True
            lines += [f"**{line}**", ""]
        elif in_section and (item := ITEM.match(line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif in_section and line.startswith("    "):
            lines.append(line[4:].replace("    ", "  ", 1))
        else:
            in_section = in_section and not line
            lines.append(line[4:] if code else re.sub(r"::$", ":", line))
    return lines


def members(thing: type) -> dict[str, object]:
    """Return what a class has of its own, and of bases that are not public."""
    bases = [each for each in thing.__mro__[1:] if each.__module__.startswith("weightsync.actors")]
    hidden = [each for each in bases if each.__name__ not in weightsync.__all__]
    inherited = {name: found for each in hidden for name, found in vars(each).items()}
    return {**vars(thing), **{name: found for name, found in inherited.items() if name not in vars(thing)}}


def page() -> str:
    """Return the whole of docs/api.md."""
    names = [name for name in weightsync.__all__ if not name.startswith("_")]
    things = {name: getattr(weightsync, name) for name in names}
    things |= {f"experts.{name}": getattr(experts, name) for name in experts.__all__}
    lines = [HEAD, "| name | what it is |", "|---|---|"]
    for name, thing in things.items():
        first = inspect.cleandoc(thing.__doc__).split("\n")[0].rstrip(":").replace("``", "`")
        lines.append(f"| [`{name}`](#{name.lower().replace('.', '')}) | {first} |")
    for name, thing in things.items():
        lines += ["", f"## {name}", "", signature(name, thing), "", *markdown(thing.__doc__)]
        for method, found in members(thing).items() if inspect.isclass(thing) else ():
            target = found if isinstance(found, property) else getattr(thing, method)
            is_method = isinstance(found, property | classmethod) or inspect.isfunction(found)
            if is_method and not method.startswith(("_", "sync_")):
                lines += ["", f"### {name}.{method}", "", signature(f"{name}.{method}", target), ""]
                lines += markdown(target.__doc__)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
