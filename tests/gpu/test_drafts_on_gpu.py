"""A draft that trainers hold, in a vLLM with CUDA graphs: it is written in place, and accepted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.contract.vllm_speculation import check_live
from tests.gpu.draft_actors import DraftEngine, DraftTrainer
from tests.gpu.fleet import spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(400),
]

CONFIG = SyncConfig(
    timeout_s=patient(30), connect_timeout_s=patient(60), components={"draft": "trained"}, mode="direct"
)
PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
SAMPLING = {"max_tokens": 32, "temperature": 0.0}


def share_accepted(engine: Any) -> float:
    """Return the part of the drafted tokens that the model accepts."""
    before = ray.get(engine.accepted.remote())
    ray.get(engine.generate.remote(PROMPTS, SAMPLING), timeout=patient(60))
    drafted, accepted = (
        now - then for now, then in zip(ray.get(engine.accepted.remote()), before, strict=True)
    )
    return accepted / drafted


def test_a_draft_that_follows_the_model_is_accepted(bundles: PlacementGroup, tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    save_qwen3(tmp_path / "model", "untied", 0)
    trainer, engine = spawn(DraftTrainer, bundles, 0), spawn(DraftEngine, bundles, 0, path, "e0")
    ray.get([trainer.start.remote(path), engine.sync_layout.remote()], timeout=patient(200))
    shares = []
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        for version, parts in enumerate((("model", "draft"), ("model",), ("draft",)), start=1):
            seed = 1 if version == 1 else 2  # the draft comes to equal the model in version 3 again
            ray.get([trainer.train.remote(part, seed) for part in parts])
            report = sync.update_weights()
            assert report.routes == {"e0": "direct"}
            assert report.proofs == {"e0": "live weights"}
            live, trained = ray.get([engine.live_draft.remote(), trainer.weights.remote("draft")])
            for name in ("model.embed_tokens.weight", "lm_head.weight"):  # vLLM pads the vocabulary
                live[name] = live[name][: len(trained[name])]
            check_live(live, trained)
            shares.append(share_accepted(engine))
            sys.stdout.write(f"{report}: {shares[-1]:.3f} of the drafted tokens accepted\n")
        sys.stdout.write("\n".join(map(str, sync.coverage())))
    assert shares[0] > 0.9
    assert shares[1] < 0.5, "the model moved away from it"
    assert shares[2] > 0.9
    ray.kill(engine)
    ray.kill(trainer)
