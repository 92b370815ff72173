"""A draft that trainers hold, in an engine with CUDA graphs: it is written in place, and accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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
    Eagle3Trainer,
    EagleTrainer,
    GlmTrainer,
    MtpTrainer,
    PairTrainer,
    SglangEagle3Trainer,
    TwinTrainer,
    follow,
    save_draft,
    save_mtp,
)
from tests.gpu.draft_actors import SglangDrafts, VllmDrafts
from tests.gpu.fleet import spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.mtp_models import FAMILIES, part_of_rank
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, SyncReport, WeightSync
from weightsync.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(400),
]

CONFIG = SyncConfig(
    timeout_s=patient(30), connect_timeout_s=patient(60), components={"draft": "trained"}, mode="direct"
)
SHARED = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Case:
    """An engine's package, a way to speculate, who trains the draft, and how many ranks the engine has."""

    package: str
    method: str
    trainer: type[PairTrainer]
    num_ranks: int = 1

    @property
    def engine(self) -> Callable[..., EngineActor]:
        return VllmDrafts if self.package == "vllm" else SglangDrafts


CASES = {
    "vllm-draft_model": Case("vllm", "draft_model", TwinTrainer),
    "vllm-eagle": Case("vllm", "eagle", EagleTrainer),
    "vllm-eagle3": Case("vllm", "eagle3", Eagle3Trainer),
    "vllm-mtp": Case("vllm", "mtp", MtpTrainer),
    "vllm-mtp-glm": Case("vllm", "mtp", GlmTrainer),
    "vllm-mtp-glm-two-ranks": Case("vllm", "mtp", GlmTrainer, num_ranks=2),
    "sglang-eagle": Case("sglang", "eagle", EagleTrainer),
    "sglang-eagle3": Case("sglang", "eagle3", SglangEagle3Trainer),
    "sglang-nextn": Case("sglang", "mtp", MtpTrainer),
}


def check_bytes(
    ranks: Sequence[dict[str, torch.Tensor]], trained: Mapping[str, torch.Tensor], case: Case
) -> None:
    """Compare each byte of the engine's draft with the trainer's, but for what it shares with the model."""
    assert len(ranks) == case.num_ranks
    for rank, live in enumerate(ranks):
        for name in SHARED:
            if name in trained:  # engines pad the vocabulary
                live[name] = live[name][: len(trained[name])]
            else:
                live.pop(name, None)
        if issubclass(case.trainer, MtpTrainer):
            of, wanted = FAMILIES[case.trainer.family], part_of_rank(trained, rank, case.num_ranks)
            if case.package == "sglang":
                live = {
                    re.sub(r"^model\.(mtp_block\.)?", of.layer, name): each for name, each in live.items()
                }
            check_live_mtp(live, wanted, of, packs=False)
        else:
            check_live(live, trained)


def save(folder: Path, case: Case) -> str:
    path = str(folder / "model")
    if issubclass(case.trainer, MtpTrainer):
        save_mtp(path, case.trainer.family)
    else:
        save_qwen3(folder / "model", "untied", 0)
        save_draft(path, case.method, case.package)
    return path


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_draft_that_follows_the_model_is_accepted(
    case: Case, bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    pytest.importorskip(case.package)
    if num_gpus < case.num_ranks:
        pytest.skip(f"needs {case.num_ranks} GPUs")
    path = save(tmp_path, case)
    trainer = spawn(case.trainer, bundles, 0)
    arguments = path, "e0", case.method, case.num_ranks
    engine = spawn_engine(case.engine, bundles, range(case.num_ranks), *arguments)
    ray.get([trainer.start.remote(path), engine.sync_layout.remote()], timeout=patient(200))

    def check(report: SyncReport) -> None:
        assert report.routes == {"e0": "direct"}
        assert report.proofs == {"e0": "live weights"}
        ranks, trained = ray.get([engine.live_draft.remote(), trainer.weights.remote("draft")])
        check_bytes(ranks, trained, case)

    def share_accepted() -> Any:
        return ray.get(engine.share_accepted.remote(PROMPTS, NUM_TOKENS), timeout=patient(60))

    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        follow(sync, trainer, share_accepted, check, NUM_SPECULATIVE_TOKENS[case.method])
    ray.kill(engine)
    ray.kill(trainer)


def test_a_quantised_copy_of_the_targets_head_is_refused(bundles: PlacementGroup, tmp_path: Path) -> None:
    """vLLM makes it again after its own updates alone."""
    option = "draft_lm_head_quantization"
    if option not in {each.name for each in fields(pytest.importorskip("vllm.config").SpeculativeConfig)}:
        pytest.skip("this vLLM has no such option")
    path = save(tmp_path, CASES["vllm-mtp-glm"])  # its layer of MTP has the target's head
    engine = spawn(VllmDrafts, bundles, 0, path, "e0", "mtp", 1, {option: "fp8"})
    with pytest.raises(ConfigError) as caught:
        ray.get(engine.sync_layout.remote(), timeout=patient(200))
    assert caught.value.field == f"speculative_config.{option}"
    ray.kill(engine)
