"""The code of the pages: tests run its blocks by `run_block`, and test_docs.py finds those that none runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "weightsync", "recipes", "benchmarks", "configs", "examples", "tests")


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]


def blocks(page: str, kind: str = "python") -> list[str]:
    """Return a page's blocks of code of one kind."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.+?)^```", text, re.S | re.M)


def run_block(
    page: str,
    number: int,
    names: Mapping[str, object] | None = None,
    replaced: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a page's Python block of that number. Returns all names that are known then.

    Call it with a literal page and number, by which test_docs.py finds the call. `names` are those that the
    page takes for granted. `replaced` has texts that cannot run here, such as a folder or an address.
    """
    code = blocks(page)[number]
    for text, other in (replaced or {}).items():
        assert text in code, f"{page} does not say {text}"
        code = code.replace(text, other)
    known = {"__name__": "__main__", **(names or {})}  # classes of __main__ are pickled with their code
    exec(compile(code, page, "exec"), known)
    return known
