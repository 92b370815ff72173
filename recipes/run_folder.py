"""A run's folder, in which a full disk ends nothing that the run does."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["RunFolder", "replace_text"]


class RunFolder:
    """Takes what a run leaves behind; what cannot be written is said when the run's outcome has been."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lost: dict[str, str] = {}

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Have `write` make the file or folder `name`; an OSError is kept for `complaint`."""
        try:
            write(self.path / name)
        except OSError as error:
            self._lost[name] = error.strerror or str(error)
        else:
            self._lost.pop(name, None)

    def lacks(self, names: Collection[str]) -> bool:
        """Whether the last version of any of these could not be written."""
        return not self._lost.keys().isdisjoint(names)

    def complaint(self) -> str:
        """One line of what could not be written; empty if all was."""
        if not self._lost:
            return ""
        why = ", ".join(dict.fromkeys(self._lost.values()))
        return f"could not write {', '.join(self._lost)} in {self.path}: {why}"


def replace_text(path: Path, text: str) -> None:
    """Replace `path` as a whole, so that a reader never meets a half. Raises OSError, and leaves it then."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
