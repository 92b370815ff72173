"""A real vLLM that launches a step ahead, as it does by default on GPUs, is paused and updated."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import TIMEOUT_S, Rig
from tests.contract.request_loops import until
from tests.vllm_imports import import_vllm
from weightsync.config import PrefixCache

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.faults,
]

PROMPTS, NUM_TOKENS, STOP = [[1, 2, 3], [4, 5, 6]], 20, 6


def schedule_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs vLLM turns asynchronous scheduling off, which works there: turn it on again."""
    import_vllm()
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(cls: type, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))


def test_each_token_has_the_version_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_ahead(monkeypatch)
    rig, treatments = Rig("vllm", False, "host", tmp_path), list[PrefixCache](["salt", "drop"])
    try:
        for version, treatment in zip((1, 3), treatments, strict=True):
            rig.engine.use_prefix_cache(treatment)
            rig.update(rig.models[0], version)
            with rig.stopped_at(STOP) as (arrived, go_on):
                running = rig.generate(PROMPTS, NUM_TOKENS)
                assert arrived.wait(TIMEOUT_S)
                paused = rig.threads.submit(rig.engine.pause, "keep", TIMEOUT_S)
                until(rig.is_asked_to_pause)
                go_on.set()
                paused.result(TIMEOUT_S)
            rig.load(rig.models[1])
            rig.engine.resume(version + 1)
            rollout = running.result(TIMEOUT_S)
            for prompt, tokens, segments in zip(PROMPTS, rollout.tokens, rollout.segments, strict=True):
                assert segments == [(version, STOP), (version + 1, NUM_TOKENS - STOP)], treatment
                assert rig.serves(rig.models[0], [prompt], [tokens[:STOP]], STOP)
                if treatment == "drop":  # else the new weights read what the old ones cached
                    rest = prompt + tokens[:STOP], tokens[STOP:]
                    assert rig.serves(rig.models[1], [rest[0]], [rest[1]], NUM_TOKENS - STOP)
    finally:
        rig.close()
