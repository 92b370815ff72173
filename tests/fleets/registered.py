"""The engine and the source of docs/extending.md, in actors, for tests: their processes import this."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tests.pages import run_block
from weightsync.actors.engine import EngineActor


class Elsewhere(EngineActor):
    """An engine actor in whose process the page's engine is a module of its user."""

    def __init__(self, *args: Any) -> None:
        home = ModuleType("my_engines")
        home.SumEngine = run_block("docs/extending.md", 0)["SumEngine"]  # type: ignore[attr-defined]
        sys.modules[home.__name__] = home
        super().__init__(*args)


def array_trainer() -> type:
    """Return the page's trainer, with a method that writes its weights."""
    base = run_block("docs/extending.md", 2)["ArrayTrainer"]

    class Trainer(base):
        def write(self, values: Any) -> None:
            self.source.arrays["weight"][...] = values

    return Trainer
