"""A draft that trainers hold, in an engine with CUDA graphs: it is written in place, and accepted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.contract.vllm_speculation import check_live
from tests.gpu.draft_actors import DraftTrainer, EagleTrainer, SglangDrafts, VllmDrafts, save_eagle
from tests.gpu.fleet import spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(400),
]

CONFIG = SyncConfig(
    timeout_s=patient(30), connect_timeout_s=patient(60), components={"draft": "trained"}, mode="direct"
)
PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
NUM_TOKENS = 32


@pytest.mark.parametrize(
    ("package", "trainer_class", "engine_class"),
    [("vllm", DraftTrainer, VllmDrafts), ("sglang", EagleTrainer, SglangDrafts)],
)
def test_a_draft_that_follows_the_model_is_accepted(
    package: str,
    trainer_class: type[DraftTrainer],
    engine_class: type[EngineActor],
    bundles: PlacementGroup,
    tmp_path: Path,
) -> None:
    pytest.importorskip(package)
    path = str(tmp_path / "model")
    save_qwen3(tmp_path / "model", "untied", 0)
    save_eagle(path)
    trainer, engine = spawn(trainer_class, bundles, 0), spawn(engine_class, bundles, 0, path, "e0")
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
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                if name in trained:  # engines pad the vocabulary
                    live[name] = live[name][: len(trained[name])]
                else:  # an EAGLE draft uses the model's
                    live.pop(name)
            check_live(live, trained)
            asked = engine.share_accepted.remote(PROMPTS, NUM_TOKENS)
            shares.append(ray.get(asked, timeout=patient(60)))
            sys.stdout.write(f"{report}: {shares[-1]:.3f} of the drafted tokens accepted\n")
        sys.stdout.write("\n".join(map(str, sync.coverage())))
    assert shares[0] > 0.9
    assert shares[1] < 0.5, "the model moved away from it"
    assert shares[2] > 0.9
    ray.kill(engine)
    ray.kill(trainer)
