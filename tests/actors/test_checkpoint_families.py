"""Checkpoints of families whose files have other names than their modules, by `register_checkpoint`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.families import build_family
from tests.fleets.actors import spawn
from tests.models import greedy
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor

pytestmark = [pytest.mark.models, pytest.mark.timeout(300)]
PROMPTS = [[5, 6, 7], [200, 3, 90, 41]]
SAMPLING = {"max_tokens": 8, "temperature": 0.0}
VLLM = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}, "skip_mm_profiling": True}


def engine_options(family: str) -> dict[str, dict[str, Any]]:
    """Return the options of each kind of engine that serves a family here."""
    kinds: dict[str, dict[str, Any]] = {"torch": {}}
    has_images = family == "gemma3"
    if importlib.util.find_spec("vllm") and (not has_images or importlib.util.find_spec("torchvision")):
        kinds["vllm"] = VLLM | (TEXT_ONLY if has_images else {})
    return kinds


@pytest.mark.parametrize("family", ["gemma3", "mixtral", "nemotron_h"])
def test_engines_answer_as_the_checkpoint_that_was_registered(
    family: str, cluster: None, tmp_path: Path
) -> None:
    models = [build_family(tmp_path / str(seed), family, seed) for seed in range(2)]
    kinds = engine_options(family)
    engines = {
        kind: spawn(EngineActor, kind, str(tmp_path / "0"), kind, options, kind)
        for kind, options in kinds.items()
    }
    with WeightSync(SyncConfig(timeout_s=patient(60), connect_timeout_s=patient(120))) as sync:
        for seed in range(2):
            sync.register_checkpoint(str(seed), [str(tmp_path / str(seed))])
        sync.register_engines(engines)
        sync.connect()
        for seed in (0, 1):
            report = sync.update_weights(checkpoint=str(seed))
            assert report.verified
            for engine in engines.values():
                rollout = ray.get(engine.generate.remote(PROMPTS, SAMPLING))
                assert rollout.tokens == greedy(models[seed], PROMPTS, 8)
    for engine in engines.values():
        ray.get(engine.close.remote())
        ray.kill(engine)
