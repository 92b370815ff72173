"""What a real vLLM computes of prompts again after a commit, with caches that are dropped or salted."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.contract.conftest import TIMEOUT_S, Rig
from weightsync.config import PrefixCache

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
]

BLOCK = 32
PROMPT = torch.randint(3, 250, (2 * BLOCK + 8,), generator=torch.Generator().manual_seed(1)).tolist()
MOST_CACHED = 2 * BLOCK
"""The whole blocks of the prompt."""


@dataclass
class Seen:
    """By request, how many tokens vLLM found cached; by step, how many it computed."""

    cached: dict[str, int] = field(default_factory=dict)
    computed: list[int] = field(default_factory=list)

    def last_cached(self) -> int:
        return [*self.cached.values()][-1]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    options = {"block_size": BLOCK, "enable_prefix_caching": True}
    rig = Rig("vllm", False, "host", tmp_path_factory.mktemp("models"), **options)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def seen(rig: Rig) -> Seen:
    seen = Seen()

    def watch(llm: Any) -> None:
        step, scheduler = llm.step, llm.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def noted_step() -> list[Any]:
            outputs = step()
            seen.cached.update({each.request_id: each.num_cached_tokens for each in outputs})
            return outputs

        def noted_schedule(*args: Any) -> Any:
            scheduled = schedule(*args)
            seen.computed.append(scheduled.total_num_scheduled_tokens)
            return scheduled

        llm.step, scheduler.schedule = noted_step, noted_schedule

    rig.engine.call(watch)
    return seen


def asked(rig: Rig, seen: Seen, num_tokens: int = 4) -> tuple[list[int], int]:
    """What the engine answers to the prompt, and how much of the prompt it had cached."""
    (tokens,) = rig.generate([PROMPT], num_tokens).result(TIMEOUT_S).tokens
    return tokens, seen.last_cached()


@pytest.mark.parametrize("treatment", ["drop", "salt"])
def test_no_request_hits_what_another_version_cached(rig: Rig, seen: Seen, treatment: PrefixCache) -> None:
    rig.engine.use_prefix_cache(treatment)
    answers = []
    for version, model in enumerate((*rig.models, rig.models[0]), start=1):
        rig.update(model, version)
        first, again = asked(rig, seen), asked(rig, seen)
        assert first[0] == again[0]
        assert rig.serves(model, [PROMPT], [first[0]], 4), "what a model without any cache answers"
        assert (first[1], again[1]) == (0, MOST_CACHED)
        answers.append(first[0])
    assert answers[0] != answers[1], "else an old cache would answer as well"
    assert answers[0] == answers[2]


@pytest.mark.parametrize("treatment", ["drop", "salt"])
def test_the_same_number_again_is_not_the_same_version(rig: Rig, seen: Seen, treatment: PrefixCache) -> None:
    """As of another run, or of a version that was sent again."""
    rig.engine.use_prefix_cache(treatment)
    for model in rig.models:
        rig.update(model, 9)
        tokens, cached = asked(rig, seen)
        assert (rig.serves(model, [PROMPT], [tokens], 4), cached) == (True, 0)


@pytest.mark.parametrize("treatment", ["drop", "salt"])
def test_an_update_that_wrote_nothing_costs_no_cache(rig: Rig, seen: Seen, treatment: PrefixCache) -> None:
    rig.engine.use_prefix_cache(treatment)
    rig.update(rig.models[0], 1)
    tokens, _ = asked(rig, seen)
    rig.engine.pause("keep", TIMEOUT_S)
    rig.engine.resume(1)
    assert asked(rig, seen) == (tokens, MOST_CACHED)


def test_dropping_ends_what_salts_kept_apart(rig: Rig, seen: Seen) -> None:
    """A cache without a salt outlives updates with salts: it must not be hit when salts end."""
    old, new = rig.models
    rig.engine.use_prefix_cache("drop")
    rig.update(old, 1)
    asked(rig, seen)
    rig.engine.use_prefix_cache("salt")
    rig.update(new, 2)
    asked(rig, seen)
    rig.engine.use_prefix_cache("drop")  # another driver connects the engine: the salt stays until a commit
    assert asked(rig, seen)[1] == MOST_CACHED
    rig.update(new, 3)
    tokens, cached = asked(rig, seen)
    assert (rig.serves(new, [PROMPT], [tokens], 4), cached) == (True, 0)


@pytest.mark.parametrize("treatment", ["drop", "salt"])
def test_a_running_request_is_recomputed_only_where_caches_are_dropped(
    rig: Rig, seen: Seen, treatment: PrefixCache
) -> None:
    old, new = rig.models
    rig.engine.use_prefix_cache(treatment)
    rig.update(old, 1)
    with rig.stopped_at(forward=6) as (arrived, go_on):
        running = rig.generate([PROMPT], max_tokens=40)
        assert arrived.wait(TIMEOUT_S)
        paused = rig.threads.submit(rig.engine.pause, "keep", TIMEOUT_S)
        assert rig.asked.wait(TIMEOUT_S)
        go_on.set()
        paused.result(TIMEOUT_S)
    rig.load(new)
    seen.computed.clear()
    rig.engine.resume(2)
    rollout = running.result(TIMEOUT_S)
    (tokens,) = rollout.tokens
    assert rollout.versions == [(1, 2)]
    assert rig.serves(old, [PROMPT], [tokens[:6]], 6)
    assert seen.computed[0] == (1 if treatment == "salt" else len(PROMPT) + 6)
    recomputed = rig.serves(new, [PROMPT + tokens[:6]], [tokens[6:]], 34)
    assert recomputed == (treatment == "drop"), "on the cache of other weights, other tokens follow"
    later, cached = asked(rig, seen)
    assert rig.serves(new, [PROMPT], [later], 4)
    assert cached == (MOST_CACHED if treatment == "drop" else 0), "a recomputed request caches for others"
