"""The engine and the source of docs/extending.md, in actors, for tests: their processes import this."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tests.pages import run_block
from weightsync.actors.engine import EngineActor


class RegisteredEngine(EngineActor):
    """An engine of a kind that is named in this process, as the page says."""

    def __init__(self, *args: Any) -> None:
        home = ModuleType("weightsync.engines.sums")
        home.SumEngine = run_block("docs/extending.md", 0)["SumEngine"]  # type: ignore[attr-defined]
        sys.modules[home.__name__] = home
        run_block("docs/extending.md", 1)
        super().__init__(*args)


def array_trainer() -> type:
    """Return the page's trainer, with a method that writes its weights."""
    base = run_block("docs/extending.md", 2)["ArrayTrainer"]

    class Trainer(base):
        def write(self, values: Any) -> None:
            self.source.arrays["weight"][...] = values

    return Trainer
