"""SGLang answers alike whether updates wrote an adapter of experts, or SGLang read its files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.expert_adapters import STACKED
from tests.gpu.adapter_actors import SglangAdapters
from tests.gpu.expert_adapter_actors import ExpertTrainer
from tests.gpu.fleet import spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed"),
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(600),
]

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(60))
PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
TARGETS = ("q_proj", "v_proj", "o_proj")
"""SGLang wants an adapter of v where there is one of q."""
NUM_TOKENS = 16
RANK, MAX_RANK = 4, 16


@pytest.mark.parametrize(("num_ranks", "options"), [(1, {}), (2, {}), (2, {"ep_size": 2})])
def test_experts_answer_as_those_of_files(
    num_ranks: int, options: Mapping[str, int], bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    if num_gpus < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path = str(tmp_path / "base")
    save_qwen3(tmp_path / "base", "moe", 0)
    trainer = spawn(ExpertTrainer, bundles, 0)
    arguments = (path, "e0", num_ranks, MAX_RANK)
    engine = spawn_engine(SglangAdapters, bundles, range(num_ranks), *arguments, **options)
    started = [trainer.start.remote(path, RANK, False, TARGETS, STACKED), engine.sync_layout.remote()]
    ray.get(started, timeout=patient(200))
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        based = sync.update_weights(checkpoint="base")
        assert based.proofs == {"e0": "live weights"}, "its loader has found the experts beside their slots"
        sync.register_adapter("math", [trainer])
        seen = set()
        for version in range(1, 4):  # the third one is written over the first one
            folder = str(tmp_path / f"v{version}")
            ray.get([trainer.train.remote(version), trainer.save_by_expert.remote(folder, RANK)])
            report = sync.update_adapter("math")
            sys.stdout.write(f"{report} {report.seconds * 1e3:.1f} ms {dict(report.phases)}\n")
            assert report.verified
            assert report.proofs == {"e0": "live weights"}
            rollout = ray.get(engine.generate.remote(PROMPTS, {**sampling, "adapter": "math"}))
            assert (rollout.adapter, rollout.adapter_version) == ("math", version)
            by_file = engine.by_file.remote(folder, PROMPTS, NUM_TOKENS)
            assert rollout.tokens == ray.get(by_file, timeout=patient(120))
            seen.add(str(rollout.tokens))
        assert len(seen) == 3, "other weights, other answers"
        plain = ray.get(engine.generate.remote(PROMPTS, sampling))
        assert str(plain.tokens) not in seen
    ray.kill(engine)
    ray.kill(trainer)
