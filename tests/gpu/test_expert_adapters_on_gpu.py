"""An adapter of experts in vLLM's slots answers as one that vLLM read from files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.expert_adapters import STACKED, TARGETS
from tests.gpu.expert_adapter_actors import ExpertAdapters, ExpertTrainer
from tests.gpu.fleet import spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from tests.stacked_qwen3 import save_plugin
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(400),
]

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(60))
PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
NUM_TOKENS = 16
RANK, MAX_RANK = 4, 16


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_experts_answer_as_those_that_vllm_read_from_files(
    num_ranks: int, stacked: bool, bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    if num_gpus < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path = str(tmp_path / "base")
    save_qwen3(tmp_path / "base", "moe", 0)
    trainer = spawn(ExpertTrainer, bundles, 0)
    plugins = str(tmp_path / "plugins") if stacked else ""
    if stacked:
        save_plugin(tmp_path / "plugins")
    arguments = (path, "e0", num_ranks, MAX_RANK, plugins)
    engine = spawn_engine(ExpertAdapters, bundles, range(num_ranks), *arguments)
    started = [trainer.start.remote(path, RANK, False, TARGETS, STACKED), engine.sync_layout.remote()]
    ray.get(started, timeout=patient(200))
    kinds = ray.get(engine.kinds_of_slots.remote(), timeout=patient(60))
    assert kinds == {"FusedMoE3DWithLoRA" if stacked else "FusedMoEWithLoRA"}
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        based = sync.update_weights(checkpoint="base")
        sys.stdout.write(f"{based} {based.proofs} {based.routes}\n")
        if num_ranks == 1:
            assert ray.get(engine.wrong_experts.remote(path), timeout=patient(60)) == []
        sync.register_adapter("math", [trainer])
        seen = set()
        for version in range(1, 4):  # the third one is written over the first one
            folder = str(tmp_path / f"v{version}")
            trained = trainer.train.remote(version)
            saved = trainer.save.remote(folder) if stacked else trainer.save_by_expert.remote(folder, RANK)
            ray.get([trained, saved])
            report = sync.update_adapter("math")
            sys.stdout.write(f"{report} {report.seconds * 1e3:.1f} ms {dict(report.phases)}\n")
            assert report.verified
            assert report.proofs == {"e0": "live weights"}
            ours, theirs = ray.get(
                [engine.slots.remote(version), engine.slots_from_file.remote(folder)], timeout=patient(60)
            )
            for rank, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
                assert found.keys() == wanted.keys()
                for name, each in wanted.items():
                    np.testing.assert_array_equal(found[name], each, err_msg=f"rank {rank}: {name}")
                assert any(each.any() for name, each in wanted.items() if ".w2_lora_b" in name)
            rollout = ray.get(engine.generate.remote(PROMPTS, {**sampling, "adapter": "math"}))
            assert (rollout.adapter, rollout.adapter_version) == ("math", version)
            by_file = engine.by_file.remote(folder, PROMPTS, NUM_TOKENS)
            assert rollout.tokens == ray.get(by_file, timeout=patient(60))
            seen.add(str(rollout.tokens))
        assert len(seen) == 3, "other weights, other answers"
        plain = ray.get(engine.generate.remote(PROMPTS, sampling))
        assert str(plain.tokens) not in seen
    ray.kill(engine)
    ray.kill(trainer)
