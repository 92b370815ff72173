"""Rollouts of a step: splits prompts among serving engines, and retries prompts of failed engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ray.actor import ActorHandle

from weightsync.engines import Rollout
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    PeerError,
    PeerLostError,
    StateError,
    WeightSyncError,
)
from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.fleet.calls import gather
from weightsync.recipes.training.grpo import PromptGroup
from weightsync.recipes.training.task import Problem, reward

Actor: TypeAlias = "ActorHandle[Any]"

_THEIR_FAULT = (PeerLostError, PeerError, EngineError, DeadlineError)
"""With an adapter also ConfigError and StateError: a healed engine may not have the adapter yet."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The groups of completions of one step.

    Attributes:
        groups: one per problem, in no order.
        versions: the versions that made them, ascending.
        lost: the errors of engines that failed. Other engines took over the prompts.
    """

    groups: list[PromptGroup]
    versions: list[int]
    lost: Mapping[str, WeightSyncError]

    @property
    def reward(self) -> float:
        """Mean reward of all completions."""
        rewards = [value for group in self.groups for value in group.rewards]
        return sum(rewards) / len(rewards)


def roll_out(
    problems: Sequence[Problem],
    serving: Callable[[], Mapping[str, Actor]],
    loop: LoopSpec,
    seeds: random.Random,
    timeout_s: float,
    adapter: str = "",
) -> Rollouts:
    """Sample completions of all `problems` from the engines that `serving` names, by their `adapter` if any.

    Raises:
        WeightSyncError: the first engine's error, once no engine is left. An error that is not an engine's
            own fault is raised at once.
    """
    groups: list[PromptGroup] = []
    versions: set[int] = set()
    lost: dict[str, WeightSyncError] = {}
    left = list(problems)
    while left:
        engines = {name: engine for name, engine in serving().items() if name not in lost}
        if not engines:
            raise next(iter(lost.values()), StateError("no engine serves a version: update them first"))
        shares = {name: left[i :: len(engines)] for i, name in enumerate(engines) if left[i :: len(engines)]}
        made, failures = _generate(shares, engines, loop, seeds, timeout_s, adapter)
        for name, rollout in made.items():
            versions.add(rollout.adapter_version if adapter else rollout.version)
            groups += _groups(shares[name], rollout, loop.group_size)
        lost |= failures
        left = [problem for name in failures for problem in shares[name]]
    return Rollouts(groups, sorted(versions), lost)


def _generate(
    shares: Mapping[str, Sequence[Problem]],
    engines: Mapping[str, Actor],
    loop: LoopSpec,
    seeds: random.Random,
    timeout_s: float,
    adapter: str,
) -> tuple[dict[str, Rollout], dict[str, WeightSyncError]]:
    """Ask each engine for a share of the rollouts. Returns rollouts and errors by engine.

    Each call has another seed: engines with the same seed would explore the same way.
    """
    named: dict[str, object] = {"max_tokens": loop.num_pairs, "temperature": loop.temperature}
    named["n"] = loop.group_size
    named |= {"adapter": adapter} if adapter else {}
    calls = {
        f"engine {name}": engines[name].generate.remote(
            [problem.prompt for problem in share], {"seed": seeds.getrandbits(32)} | named
        )
        for name, share in shares.items()
    }
    outcome = gather(calls, "generate", timeout_s)
    for error in outcome.failures.values():
        if not isinstance(error, (*_THEIR_FAULT, StateError, ConfigError) if adapter else _THEIR_FAULT):
            raise error
    bare = {process: process.removeprefix("engine ") for process in calls}
    made = {bare[process]: rollout for process, rollout in outcome.answers.items()}
    return made, {bare[process]: error for process, error in outcome.failures.items()}


def _groups(problems: Sequence[Problem], rollout: Rollout, size: int) -> list[PromptGroup]:
    """Group completions: `size` per problem, in order."""
    groups = []
    for index, problem in enumerate(problems):
        own = slice(index * size, (index + 1) * size)
        completions = rollout.tokens[own]
        rewards = [reward(problem, done) for done in completions]
        groups.append(PromptGroup(problem.prompt, completions, rewards, rollout.logprobs[own]))
    return groups
