"""A vLLM that decodes speculatively: its greedy tokens are those of the target, version after version."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Rig

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),  # vLLM looks at all modules
    pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning"),  # n-grams
]

NGRAM: Mapping[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
PROMPTS = [[5, 9, 3, 5, 9], [7, 7, 7, 7], [40, 2, 61, 17, 8, 2]]
"""Prompts that repeat tokens, for n-grams to be found."""


@pytest.fixture
def speculative() -> Mapping[str, Any]:
    return NGRAM


@pytest.fixture
def rig(speculative: Mapping[str, Any], tmp_path: Path) -> Iterator[Rig]:
    options = {"speculative_config": speculative, "disable_log_stats": False}
    rig = Rig("vllm", False, "host", tmp_path, **options)
    yield rig
    rig.close()


def counted(rig: Rig) -> dict[str, int]:
    """How many tokens were drafted, and how many of them accepted, since the engine started."""
    metrics = rig.engine.call(lambda engine: engine.get_metrics())
    values = {each.name: int(each.value) for each in metrics if hasattr(each, "value")}
    return {name: values[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}


def test_tokens_with_ngrams_are_those_of_the_target(rig: Rig) -> None:
    for version in (1, 2, 3):
        model = rig.models[version % 2]
        rig.update(model, version)
        rollout = rig.generate(PROMPTS).result()
        assert rig.serves(model, PROMPTS, rollout.tokens)
        assert rollout.versions == [(version, version)] * len(PROMPTS)
    assert counted(rig)["draft"] > 0
