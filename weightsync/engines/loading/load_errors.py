"""The errors of a load, as `Engine.load` raises them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import DeadlineError, EngineError, WeightSyncError


@contextmanager
def naming_load(engine: str, rank: int) -> Iterator[None]:
    """Turn any WeightSyncError but a DeadlineError into an EngineError of `engine`."""
    try:
        yield
    except (DeadlineError, EngineError):
        raise
    except WeightSyncError as error:
        raise EngineError(engine, "load", str(error), rank) from error
