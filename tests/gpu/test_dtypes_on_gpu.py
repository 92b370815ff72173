"""Engines of two dtypes on two GPUs: each holds the trainer's values as its own dtype has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup

from tests.fleets.dtype_actors import DtypeEngine
from tests.gpu.fleet import Trainer, spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))
DTYPES = {"brain": "bfloat16", "single": "float32"}


def test_each_engine_has_the_trainers_values_in_its_own_dtype(
    bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    if num_gpus < len(DTYPES):
        pytest.skip("needs a GPU for each engine")
    path = str(tmp_path / "model")
    save_qwen3(tmp_path / "model", "untied", 0)
    trainer = spawn(Trainer, bundles, 0, path, 0, 1, "float32", "device")
    engines = {
        name: spawn(DtypeEngine, bundles, gpu, "torch", path, name, {"dtype": dtype, "device": "cuda"})
        for gpu, (name, dtype) in enumerate(DTYPES.items())
    }
    joining = trainer.join.remote(str(tmp_path / "meeting"))
    ray.get([joining, *(each.sync_layout.remote() for each in engines.values())], timeout=patient(200))
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        for version in (1, 2, 3):
            ray.get(trainer.train.remote(version))
            report = sync.update_weights()
            sys.stdout.write(f"{report} {dict(report.routes)} {dict(report.proofs)}\n")
            assert report.engines == dict.fromkeys(DTYPES, version)
            trained = ray.get(trainer.tensors.remote())
            for name, dtype in DTYPES.items():
                live = ray.get(engines[name].live.remote())
                assert live.keys() == trained.keys()
                for tensor, held in live.items():
                    assert torch.equal(held.cpu(), trained[tensor].to(getattr(torch, dtype))), (name, tensor)
        sys.stdout.write("\n".join(map(str, sync.coverage())))
    for each in (trainer, *engines.values()):
        ray.kill(each)
