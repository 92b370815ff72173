"""Finds words that the project no longer uses, and says what to use instead.

python -m tests.word_list           # exit code 1 if there are any
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
FOLDERS = ("weightsync", "actors", "recipes", "docs")
SUFFIXES = (".py", ".md")


def read_list(text: str) -> dict[str, str]:
    """Return the old words in lower case with their replacements.

    Raises ValueError for other lines.
    """
    words: dict[str, str] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z]+(?:_[a-z]+)*) -> (\S.*)", line)
        if not match or match[1] in words:
            raise ValueError(f"{LIST.name}: {line!r} has to be a new `old -> what to use instead`")
        words[match[1]] = match[2]
    return words


def checked_files(root: Path) -> list[Path]:
    """Return README.md and all Python and Markdown files of the checked folders."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in SUFFIXES]
    return [root / "README.md", *sorted(found)]


def findings(root: Path, words: Mapping[str, str]) -> list[str]:
    """Return each use of an old word, as ``file:line: word: use ...``."""
    patterns = {old: (re.compile(_forms(old)), new) for old, new in words.items()}
    texts = {path: path.read_text(encoding="utf-8") for path in checked_files(root)}
    return [
        f"{path.relative_to(root)}:{number}: {match[0]}: use {new}"
        for path, text in texts.items()
        for possible in [[patterns[old] for old in _possible(text, words)]]
        for number, line in enumerate(text.splitlines() if possible else [], start=1)
        for pattern, new in possible
        for match in pattern.finditer(line)
    ]


def _possible(text: str, words: Iterable[str]) -> list[str]:
    """Return those of `words` that may be in `text`, since searching for a pattern is slow."""
    letters = text.lower().replace("_", "")
    return [word for word in words if word.replace("_", "") in letters]


def _forms(word: str) -> str:
    """Return a pattern for `word` and its plural, such as `word`, `word_size`, `MyWord`, `MAX_WORDS`."""
    camel = "".join(part.capitalize() for part in word.split("_"))
    lower = rf"(?<![A-Za-z]){word}s?(?![a-z])"
    upper = rf"(?<![A-Za-z]){word.upper()}S?(?![A-Za-z])"
    return rf"{lower}|{camel}s?(?![a-z])|{upper}"


def main() -> int:
    found = findings(ROOT, read_list(LIST.read_text(encoding="utf-8")))
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
