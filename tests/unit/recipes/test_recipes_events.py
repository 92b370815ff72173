from __future__ import annotations

import pytest

from weightsync.errors import ConfigError
from weightsync.recipes.config.events import EventSpec, check_events, present_at_start

ENGINES = ("main-0", "main-1", "late-0")


def events(*rows: tuple[int, str, str]) -> list[EventSpec]:
    return [EventSpec(step=step, action=action, engine=engine) for step, action, engine in rows]  # type: ignore[arg-type]


def test_who_is_added_later_is_not_there_at_the_start() -> None:
    plan = events(
        (9, "remove", "late-0"), (3, "add", "late-0"), (5, "remove", "main-0"), (7, "add", "main-0")
    )
    assert present_at_start(ENGINES, plan) == ("main-0", "main-1")
    assert present_at_start(ENGINES, ()) == ENGINES
    check_events(ENGINES, plan, num_steps=9)


@pytest.mark.parametrize(
    ("rows", "field", "remedy"),
    [
        ([(3, "kill", "mian-0")], "events[0].engine", "did you mean 'main-0'"),
        ([(0, "kill", "main-0")], "events[0].step", "from 1 to 9"),
        ([(10, "kill", "main-0")], "events[0].step", "from 1 to 9"),
        ([(2, "add", "late-0"), (3, "add", "late-0")], "events[1].action", "late-0 is there before step 3"),
        ([(5, "kill", "late-0"), (6, "add", "late-0")], "events[1].action", "late-0 is there before step 6"),
        ([(2, "remove", "main-0"), (3, "kill", "main-0")], "events[1].action", "not there before step 3"),
        ([(2, "remove", name) for name in ENGINES], "events[2].engine", "the last engine"),
    ],
)
def test_what_cannot_happen_is_refused(rows: list[tuple[int, str, str]], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_events(ENGINES, events(*rows), num_steps=9)
    assert caught.value.field == field
    assert remedy in caught.value.remedy
