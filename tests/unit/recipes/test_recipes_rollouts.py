"""Prompts among engines that answer, die, hang or refuse; plain coroutines stand for Ray's calls."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from weightsync.engines.base import Completion, Rollout
from weightsync.errors import ConfigError, DeadlineError, EngineError, PeerLostError, StateError
from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.loops.rollouts import Rollouts, roll_out
from weightsync.recipes.training.task import Problem, ProblemSampler

LOOP = LoopSpec(group_size=3, prompts_per_step=8)
PROBLEMS = [Problem(left, right) for left in range(4) for right in range(2)]


class Engine:
    """`generate.remote` as of an actor's handle; answers every prompt with its last digit."""

    def __init__(self, version: int = 7, failure: Exception | None = None, hangs: bool = False) -> None:
        self._version, self._failure, self._hangs = version, failure, hangs
        self.calls: list[tuple[int, Mapping[str, Any]]] = []
        self.generate = self

    async def remote(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> Rollout:
        self.calls.append((len(prompts) * sampling["n"], sampling))
        if self._failure:
            raise self._failure
        if self._hangs:
            await asyncio.Event().wait()
        return Rollout.of(
            [
                Completion([prompt[2]], [(self._version, 1)], [-float(prompt[2])], "length")
                for prompt in prompts
                for _ in range(sampling["n"])
            ]
        )


def sample(serving: Callable[[], Mapping[str, Any]], problems: Sequence[Problem] = PROBLEMS) -> Rollouts:
    return roll_out(problems, serving, LOOP, random.Random(0), 0.2)


def assert_complete(rollouts: Rollouts, problems: Sequence[Problem]) -> None:
    prompts = Counter(tuple(group.prompt) for group in rollouts.groups)
    assert prompts == Counter(tuple(problem.prompt) for problem in problems)
    for group in rollouts.groups:
        assert group.completions == [[group.prompt[2]]] * LOOP.group_size
        assert group.logprobs == [[-float(group.prompt[2])]] * LOOP.group_size


def test_every_problem_gets_its_group_from_one_engine() -> None:
    engines = {"a": Engine(7), "b": Engine(6), "c": Engine(7)}
    problems = ProblemSampler(0).sample(8)
    rollouts = sample(lambda: engines, problems)
    assert_complete(rollouts, problems)
    assert rollouts.versions == [6, 7]
    assert rollouts.lost == {}
    assert [engine.calls[0][0] for engine in engines.values()] == [9, 9, 6]
    assert len({engine.calls[0][1]["seed"] for engine in engines.values()}) == 3
    for group in rollouts.groups:
        right = max(group.prompt[1:3]) == group.prompt[2]
        assert group.rewards == [float(right)] * LOOP.group_size


@pytest.mark.parametrize(
    "broken",
    [
        Engine(failure=PeerLostError("engine b", "killed")),
        Engine(failure=EngineError("b", "generate", "no kernel")),
        Engine(hangs=True),
    ],
)
def test_the_prompts_of_an_engine_that_fails_go_to_the_others(broken: Engine) -> None:
    engines = {"a": Engine(), "b": broken, "c": Engine()}
    rollouts = sample(lambda: engines)
    assert_complete(rollouts, PROBLEMS)
    assert list(rollouts.lost) == ["b"]
    assert len(broken.calls) == 1
    for name in ("a", "c"):
        first, again = engines[name].calls
        assert first[1]["seed"] != again[1]["seed"]


def test_who_serves_is_asked_anew_when_one_fails() -> None:
    standby = Engine()
    answers = iter([{"a": Engine(failure=PeerLostError("engine a", "killed"))}, {"b": standby}])
    rollouts = sample(lambda: next(answers))
    assert_complete(rollouts, PROBLEMS)
    assert [count for count, _ in standby.calls] == [len(PROBLEMS) * LOOP.group_size]


def test_an_engine_without_a_prompt_is_not_asked() -> None:
    idle = Engine()
    sample(lambda: {"a": Engine(), "b": idle}, PROBLEMS[:1])
    assert idle.calls == []


def test_the_first_failure_is_raised_when_nobody_is_left() -> None:
    dead = Engine(failure=PeerLostError("engine a", "killed"))
    with pytest.raises(PeerLostError, match="engine a is gone"):
        sample(lambda: {"a": dead, "b": Engine(hangs=True)})
    with pytest.raises(DeadlineError) as caught:
        sample(lambda: {"b": Engine(hangs=True)})
    assert caught.value.missing == ("engine b",)


def test_without_any_engine_that_serves_there_is_no_rollout() -> None:
    with pytest.raises(StateError, match="no engine serves"):
        sample(dict)


def test_a_mistake_of_ours_is_not_tried_on_the_next_engine() -> None:
    other = Engine()
    with pytest.raises(ConfigError):
        sample(lambda: {"a": Engine(failure=ConfigError("sampling.n", 0, "give 1")), "b": other})
    assert len(other.calls) == 1
