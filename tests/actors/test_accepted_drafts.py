"""Real vLLMs in bfloat16 with EAGLE drafts or an MTP layer that predict their model, until that moves away.

On GPUs, `tests/gpu/test_drafts_on_gpu.py` does the same with CUDA graphs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import ray

from tests.contract.vllm_speculation import check_live, check_live_mtp
from tests.draft_pairs import (
    NUM_SPECULATIVE_TOKENS,
    NUM_TOKENS,
    PROMPTS,
    Eagle3Trainer,
    EagleTrainer,
    GlmTrainer,
    MtpTrainer,
    PairTrainer,
    follow,
    save_draft,
    save_mtp,
    speculative_config,
)
from tests.fleets.actors import spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.mtp_models import FAMILIES
from tests.patience import patient
from weightsync import SyncConfig, SyncReport, WeightSync

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(120), components={"draft": "trained"})


@pytest.mark.parametrize(
    ("method", "trainer_class"),
    [
        pytest.param("eagle", EagleTrainer, id="eagle"),
        pytest.param("eagle3", Eagle3Trainer, id="eagle3"),
        pytest.param("mtp", MtpTrainer, id="mtp-mimo"),
        pytest.param("mtp", GlmTrainer, id="mtp-glm"),
    ],
)
def test_a_pair_is_accepted_while_both_are_of_one_version(
    method: str, trainer_class: type[PairTrainer], tmp_path: Path
) -> None:
    from tests.fleets.draft_engine import DraftEngine

    path = str(tmp_path / "model")
    if issubclass(trainer_class, MtpTrainer):
        save_mtp(path, trainer_class.family)
    else:
        save_qwen3(tmp_path / "model", "untied", 0)
        save_draft(path, method, "vllm")
    options = {"dtype": "bfloat16", "max_model_len": 256}
    options["speculative_config"] = speculative_config(path, method)
    trainer, engine = spawn(trainer_class), spawn(DraftEngine, "vllm", path, "e0", options, "e0")
    ray.get([trainer.start.remote(path, "cpu"), engine.sync_layout.remote()], timeout=patient(120))

    def check(report: SyncReport) -> None:
        assert report.engines == {"e0": report.version}
        live, trained = ray.get([engine.live_draft.remote(), trainer.weights.remote("draft")])
        if issubclass(trainer_class, MtpTrainer):
            check_live_mtp(live, trained, FAMILIES[trainer_class.family])
        else:
            check_live(live, trained)

    def share_accepted() -> float:
        before = ray.get(engine.draft_counts.remote())
        asked = engine.generate.remote(PROMPTS, {"max_tokens": NUM_TOKENS, "temperature": 0.0})
        ray.get(asked, timeout=patient(60))
        return ray.get(engine.draft_counts.remote()).since(before).acceptance

    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        follow(sync, trainer, share_accepted, check, NUM_SPECULATIVE_TOKENS[method])
    ray.get(engine.close.remote(), timeout=patient(30))
    ray.kill(engine)
    ray.kill(trainer)
