"""Events of a fleet, and the one place that they go through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from weightsync.errors import WeightSyncError
from weightsync.report import HealReport

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Engine `name` is STALE or DEAD, because of `error`."""

    name: str
    error: WeightSyncError


@dataclass(frozen=True, slots=True)
class EngineBack:
    """Engine `name`, which is DEAD since it was silent, answers again."""

    name: str


@dataclass(frozen=True, slots=True)
class EngineLeftOut:
    """Engine `name` lives, and took no part in an update, since it is not connected."""

    name: str


@dataclass(frozen=True, slots=True)
class EngineHealed:
    """An engine serves again."""

    report: HealReport


@dataclass(frozen=True, slots=True)
class HolderSilent:
    """A holder did not answer; the next update connects first."""


class Events:
    """Calls each subscriber of an event's type, in the order in which they subscribed."""

    def __init__(self) -> None:
        self._handlers: defaultdict[type, list[Callable[[Any], None]]] = defaultdict(list)

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Have `handler` called with every event of type `kind`. It must not raise."""
        self._handlers[kind].append(handler)

    def publish(self, event: object) -> None:
        """Tell all subscribers before returning."""
        for handler in self._handlers[type(event)]:
            handler(event)
