"""A run's folder. A full disk does not end the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path


class RunFolder:
    """Writes a run's files, and collects the errors for `complaint`."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lost: dict[str, str] = {}

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Call `write` with the path of `name`. An OSError goes to `complaint`."""
        try:
            write(self.path / name)
        except OSError as error:
            self._lost[name] = error.strerror or str(error)
        else:
            self._lost.pop(name, None)

    def lacks(self, names: Collection[str]) -> bool:
        """Return whether the last write of any of these failed."""
        return not self._lost.keys().isdisjoint(names)

    def complaint(self) -> str:
        """Return one line with the files that could not be written, or an empty string."""
        if not self._lost:
            return ""
        why = ", ".join(dict.fromkeys(self._lost.values()))
        return f"could not write {', '.join(self._lost)} in {self.path}: {why}"


def replace_text(path: Path, text: str) -> None:
    """Replace `path` atomically, so that readers never see part of it. On OSError it is unchanged."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
