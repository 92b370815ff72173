"""A draft that trainers hold, in an engine with CUDA graphs: it is written in place, and accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup

from tests.contract.vllm_speculation import check_live, check_live_mtp
from tests.draft_pairs import (
    NUM_SPECULATIVE_TOKENS,
    NUM_TOKENS,
    PROMPTS,
    EagleTrainer,
    MtpTrainer,
    PairTrainer,
    TwinTrainer,
    follow,
    save_eagle,
    save_mtp,
)
from tests.gpu.draft_actors import SglangDrafts, VllmDrafts
from tests.gpu.fleet import spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.mtp_models import FAMILIES
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, SyncReport, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(400),
]

CONFIG = SyncConfig(
    timeout_s=patient(30), connect_timeout_s=patient(60), components={"draft": "trained"}, mode="direct"
)


def check_bytes(live: dict[str, torch.Tensor], trained: Mapping[str, torch.Tensor], method: str) -> None:
    """Compare each byte of the engine's draft with the trainer's, but for what it shares with the model."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in trained:  # engines pad the vocabulary
            live[name] = live[name][: len(trained[name])]
        else:
            live.pop(name, None)
    if method == "mtp":
        check_live_mtp(live, trained, FAMILIES["mimo"])
    else:
        check_live(live, trained)


@pytest.mark.parametrize(
    ("package", "method", "trainer_class", "engine_class"),
    [
        pytest.param("vllm", "draft_model", TwinTrainer, VllmDrafts, id="vllm-draft_model"),
        pytest.param("vllm", "eagle", EagleTrainer, VllmDrafts, id="vllm-eagle"),
        pytest.param("vllm", "mtp", MtpTrainer, VllmDrafts, id="vllm-mtp"),
        pytest.param("sglang", "eagle", EagleTrainer, SglangDrafts, id="sglang-eagle"),
    ],
)
def test_a_draft_that_follows_the_model_is_accepted(
    package: str,
    method: str,
    trainer_class: type[PairTrainer],
    engine_class: Callable[..., EngineActor],
    bundles: PlacementGroup,
    tmp_path: Path,
) -> None:
    pytest.importorskip(package)
    path = str(tmp_path / "model")
    if method == "mtp":
        save_mtp(path)
    else:
        save_qwen3(tmp_path / "model", "untied", 0)
        save_eagle(path, package)
    trainer, engine = spawn(trainer_class, bundles, 0), spawn(engine_class, bundles, 0, path, "e0", method)
    ray.get([trainer.start.remote(path), engine.sync_layout.remote()], timeout=patient(200))

    def check(report: SyncReport) -> None:
        assert report.routes == {"e0": "direct"}
        assert report.proofs == {"e0": "live weights"}
        live, trained = ray.get([engine.live_draft.remote(), trainer.weights.remote("draft")])
        check_bytes(live, trained, method)

    def share_accepted() -> Any:
        return ray.get(engine.share_accepted.remote(PROMPTS, NUM_TOKENS), timeout=patient(60))

    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        follow(sync, trainer, share_accepted, check, NUM_SPECULATIVE_TOKENS[method])
    ray.kill(engine)
    ray.kill(trainer)
