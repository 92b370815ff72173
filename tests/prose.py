"""Counts words that stand for a noun, to show which files to read again. No test enforces these counts.

python -m tests.prose                  # all folders of the project
python -m tests.prose weightsync/plan  # files and folders
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("README.md", "weightsync", "actors", "recipes", "benchmarks", "examples", "docs")
NOT_A_NOUN = (
    "a after also an and are as at be because before belongs but by can comes does for from gets gives goes"
    " has have if in into is it makes may must needs no not of on once only or over reads so starts takes"
    " than that the then they to until wants was were when where which while will with would"
)
"""Words after a bare *each*: "each of", "each is". A verb that is not among them passes as a noun."""
PATTERNS = {
    "its": re.compile(r"\bits\b", re.I),
    "each": re.compile(rf"\beach\b(?=\W*$|[,.;:)]|\s+(?:{'|'.join(NOT_A_NOUN.split())})\b)", re.I | re.M),
    "what": re.compile(r"\bwhat\b(?![^.?!;:|]*\?)", re.I),
    "that of": re.compile(r"\b(?:that|those) of\b", re.I),
}
"""*what* counts outside of questions."""
COMPARED = {"httpx": (0.6, 0.6, 0.7, 0.7), "torchft": (0.2, 1.9, 0, 0.1)}


def prose(path: Path) -> str:
    """Return the docstrings and comments of a Python file, or the text of a Markdown page, without code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = "\n\n".join([*_docstrings(text), *_comments(text)])
    text = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.S | re.M)
    text = re.sub(r"\n\n(?:(?: {4}.*)\n+)+", "\n\n", text + "\n") if path.suffix == ".md" else text
    return " ".join(re.sub(r"`+[^`]*`+", "code", text).split())


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def _comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def count(text: str) -> Counter[str]:
    """Return the number of words, and of matches of each pattern."""
    found = {name: len(pattern.findall(text)) for name, pattern in PATTERNS.items()}
    return Counter({"words": len(re.findall(r"\w+", text)), **found})


def files(names: list[str]) -> list[Path]:
    """Return the Python and Markdown files that are named or lie in a named folder."""
    found = (
        path
        for name in names
        for path in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
    )
    return sorted(path for path in found if path.suffix in (".py", ".md"))


def report(paths: list[Path]) -> str:
    """Return a table: the totals, other projects, and the files with the most matches first."""
    counts = {path: count(prose(path)) for path in paths}
    worst = sorted(counts, key=lambda path: -sum(counts[path][name] for name in PATTERNS))
    rows = [("per 1,000 words", "", *PATTERNS), _row("total", sum(counts.values(), Counter()))]
    rows += [(name, "", *(f"{rate:.1f}" for rate in rates)) for name, rates in COMPARED.items()]
    rows += [_row(str(path.relative_to(ROOT)), counts[path]) for path in worst]
    return "\n".join(
        f"{name:60} {words:>8}" + "".join(f"{rate:>9}" for rate in rates) for name, words, *rates in rows
    )


def _row(name: str, counted: Counter[str]) -> tuple[str, ...]:
    words = counted["words"]
    return (name, f"{words}", *(f"{1000 * counted[pattern] / max(words, 1):.1f}" for pattern in PATTERNS))


if __name__ == "__main__":
    sys.stdout.write(report(files(sys.argv[1:] or list(FOLDERS))) + "\n")
