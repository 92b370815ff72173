"""Events of the elastic loop: engines that are added, removed or killed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from weightsync.config import check_fields
from weightsync.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class EventSpec:
    """A change of the fleet. An engine that is added is absent at the start.

    Attributes:
        step: the event happens before the rollouts of this step.
        action: ``add`` starts an engine, which joins once it is up; ``remove`` removes and ends the engine;
            ``kill`` ends the process, and the engine has to heal.
        engine: ``main-0`` is the first one of the group ``main``.
    """

    step: int
    action: Literal["add", "remove", "kill"]
    engine: str

    def __post_init__(self) -> None:
        check_fields(self, field="events")


def present_at_start(engines: Collection[str], events: Sequence[EventSpec]) -> tuple[str, ...]:
    """Return the `engines` of the start: engines whose first event is not ``add``."""
    firsts: dict[str, str] = {}
    for event in sorted(events, key=lambda event: event.step):
        firsts.setdefault(event.engine, event.action)
    return tuple(name for name in engines if firsts.get(name) != "add")


def check_events(engines: Collection[str], events: Sequence[EventSpec], num_steps: int) -> None:
    """Raise ConfigError for an event of an unknown or absent engine, or after the last step."""
    for index, event in enumerate(events):
        if event.engine not in engines:
            raise ConfigError(f"events[{index}].engine", event.engine, nearest(event.engine, engines))
        if not 1 <= event.step <= num_steps:
            raise ConfigError(f"events[{index}].step", event.step, f"give a step from 1 to {num_steps}")
    present = {*present_at_start(engines, events)}
    for index, event in sorted(enumerate(events), key=lambda pair: pair[1].step):
        if (event.action == "add") is (event.engine in present):
            state = "there" if event.engine in present else "not there"
            remedy = f"{event.engine} is {state} before step {event.step}: give another engine or step"
            raise ConfigError(f"events[{index}].action", event.action, remedy)
        if event.action == "remove" and len(present) == 1:
            remedy = "it is the last engine: add another before"
            raise ConfigError(f"events[{index}].engine", event.engine, remedy)
        present ^= {event.engine} if event.action != "kill" else set()
