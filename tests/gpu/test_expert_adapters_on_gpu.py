"""An adapter of experts in an engine's slots answers as one that the engine read from files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.expert_adapters import STACKED, TARGETS
from tests.gpu.adapter_actors import SglangAdapters
from tests.gpu.expert_adapter_actors import ExpertAdapters, ExpertTrainer
from tests.gpu.fleet import spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from tests.stacked_qwen3 import save_plugin
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(600),
]

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(60))
PROMPTS = [[5, 9, 3, 7], [11] * 9, [*range(200, 230)]]
NUM_TOKENS = 16
RANK, MAX_RANK = 4, 16


@dataclass(frozen=True)
class Case:
    """An engine. `stacked`: slots and files have all experts in one tensor."""

    package: str
    num_ranks: int = 1
    stacked: bool = False
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def targets(self) -> Sequence[str]:
        """SGLang wants an adapter of v where there is one of q."""
        return TARGETS if self.package == "vllm" else ("q_proj", "v_proj", "o_proj")

    def start(self, bundles: PlacementGroup, path: str, plugins: Path) -> Any:
        gpus, arguments = range(self.num_ranks), (path, "e0", self.num_ranks, MAX_RANK)
        if self.package == "sglang":
            return spawn_engine(SglangAdapters, bundles, gpus, *arguments, **self.options)
        if self.stacked:
            save_plugin(plugins)
        return spawn_engine(ExpertAdapters, bundles, gpus, *arguments, str(plugins) if self.stacked else "")


CASES = {
    "vllm": Case("vllm"),
    "vllm_stacked": Case("vllm", stacked=True),
    "vllm_two_ranks": Case("vllm", 2),
    "vllm_two_ranks_stacked": Case("vllm", 2, stacked=True),
    "sglang": Case("sglang"),
    "sglang_two_ranks": Case("sglang", 2),
    "sglang_experts_each_on_one_of_two_ranks": Case("sglang", 2, options={"ep_size": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_answer_as_those_that_the_engine_read_from_files(
    name: str, bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    case = CASES[name]
    pytest.importorskip(case.package)
    if num_gpus < case.num_ranks:
        pytest.skip(f"needs {case.num_ranks} GPUs")
    path = str(tmp_path / "base")
    save_qwen3(tmp_path / "base", "moe", 0)
    trainer = spawn(ExpertTrainer, bundles, 0)
    engine = case.start(bundles, path, tmp_path / "plugins")
    started = [trainer.start.remote(path, RANK, False, case.targets, STACKED), engine.sync_layout.remote()]
    ray.get(started, timeout=patient(200))
    is_vllm = case.package == "vllm"
    if is_vllm:
        kinds = ray.get(engine.kinds_of_slots.remote(), timeout=patient(60))
        assert kinds == {"FusedMoE3DWithLoRA" if case.stacked else "FusedMoEWithLoRA"}
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0}
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        based = sync.update_weights(checkpoint="base")
        sys.stdout.write(f"{based} {based.proofs} {based.routes}\n")
        if not is_vllm:
            assert based.proofs == {"e0": "live weights"}, "its loader found the experts beside their slots"
        elif case.num_ranks == 1:
            assert ray.get(engine.wrong_experts.remote(path), timeout=patient(60)) == []
        sync.register_adapter("math", [trainer])
        seen = set()
        for version in range(1, 4):  # the third one is written over the first one
            folder = str(tmp_path / f"v{version}")
            trained = trainer.train.remote(version)
            by_expert = trainer.save_by_expert
            saved = trainer.save.remote(folder) if case.stacked else by_expert.remote(folder, RANK)
            ray.get([trained, saved])
            report = sync.update_adapter("math")
            sys.stdout.write(f"{report} {report.seconds * 1e3:.1f} ms {dict(report.phases)}\n")
            assert report.verified
            assert report.proofs == {"e0": "live weights"}
            if is_vllm:
                check_slots(engine, version, folder)
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


def check_slots(engine: Any, version: int, folder: str) -> None:
    """Compare each rank's slots with those that vLLM fills from files."""
    asked = [engine.slots.remote(version), engine.slots_from_file.remote(folder)]
    ours, theirs = ray.get(asked, timeout=patient(60))
    for rank, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            np.testing.assert_array_equal(found[name], each, err_msg=f"rank {rank}: {name}")
        assert any(each.any() for name, each in wanted.items() if ".w2_lora_b" in name)
