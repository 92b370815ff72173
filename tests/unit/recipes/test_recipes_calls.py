from __future__ import annotations

import asyncio

import pytest

from weightsync.errors import ConfigError, DeadlineError
from weightsync.recipes.fleet.calls import collect, gather


async def say(value: int) -> int:
    return value


async def refuse() -> int:
    raise ConfigError("sampling.seed", "x", "give a whole number")


async def never() -> int:
    await asyncio.Event().wait()
    return 0


def test_answers_come_under_the_names_of_the_called() -> None:
    assert collect({"b": say(2), "a": say(1)}, "generate", 5.0) == {"b": 2, "a": 1}


def test_an_error_of_ours_is_raised_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.seed"):
        collect({"a": say(1), "b": refuse()}, "generate", 5.0)


def test_a_deadline_names_who_is_missing_and_in_what() -> None:
    with pytest.raises(DeadlineError) as caught:
        collect({"a": say(1), "b": never()}, "train", 0.01)
    assert caught.value.missing == ("b",)
    assert caught.value.phase == "train"


def test_who_fails_does_not_take_the_answers_of_the_others_along() -> None:
    outcome = gather({"a": say(1), "b": refuse(), "c": never()}, "generate", 0.1)
    assert outcome.answers == {"a": 1}
    assert {name: type(error) for name, error in outcome.failures.items()} == {
        "b": ConfigError,
        "c": DeadlineError,
    }
