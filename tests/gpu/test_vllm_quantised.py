"""A quantised vLLM that a bf16 trainer feeds has the bytes and answers of one that loaded the checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import Trainer, VllmEngine, spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.test_vllm import assert_same, from_disk, served
from tests.patience import patient
from tests.quantised import int4, save_quantised
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))


def dynamic(layout: str, kind: str) -> dict[str, Any]:
    """Weights with a scale for each channel, and activations with one for each token."""
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, dict[str, Any]] = {
    "int4": int4(symmetric=True),
    "int4 with zero points": int4(symmetric=False),
    "int8": dynamic("int-quantized", "int"),
    "fp8": dynamic("float-quantized", "float"),
    "fp8 blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(4)],
    },
}
CASES = [*(("untied", form) for form in FORMATS), ("moe", "fp8 blocks")]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_vllm_answers_as_from_the_quantised_checkpoint(
    kind: str, form: str, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """The first version goes through vLLM's loader, the others are quantised in place where they can be."""
    paths = [tmp_path / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(path, kind, seed)
        save_quantised(path, path.with_name(f"{seed}-packed"), FORMATS[form])
    packed = [path.with_name(f"{path.name}-packed") for path in paths]
    expected = [from_disk(str(path), 1) for path in packed]
    held = [json.loads((path / "live.json").read_text()) for path in packed]
    assert expected[0] != expected[1]
    trainer = spawn(Trainer, bundles, 0, str(paths[0]), 0, 1, "bfloat16", "device")
    engine = spawn(VllmEngine, bundles, 0, str(tmp_path / "served"), "e0", 1)
    ray.get([trainer.join.remote(str(tmp_path / "meeting")), engine.info.remote()], timeout=patient(200))
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        for version, number in enumerate((0, 1, 0), start=1):
            ray.get(trainer.load.remote(str(paths[number])))
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {report.routes} {dict(report.phases)}\n")
            assert report.engines == {"e0": version}
            (live,), (wanted,) = ray.get(engine.live.remote()), held[number]
            differ = [name for name in wanted if live[name] != wanted[name]]
            assert [name for name in differ if ".attn._" not in name] == []  # the cache is not quantised
            assert_same(ray.get(engine.answers.remote()), expected[number])
    ray.get(engine.close.remote())
    for actor in (trainer, engine):
        ray.kill(actor)


@pytest.mark.parametrize(
    ("form", "version"), [("int4 with zero points", 1), ("int8", 1), ("fp8", 1), ("fp8 blocks", 2)]
)
def test_a_killed_vllm_comes_back_with_the_packed_weights(
    form: str, version: int, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """Its holder's copy of them fills it: the trainer, which has gone on, is not asked.

    The second version is quantised in place where that is possible.
    """
    paths = [tmp_path / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(path, "untied", seed)
    save_quantised(paths[0], tmp_path / "0-packed", FORMATS[form])
    arguments = served(str(tmp_path / "0-packed")), "e0", 1
    trainer = spawn(Trainer, bundles, 0, str(paths[0]), 0, 1, "bfloat16", "device")
    engine = spawn(VllmEngine, bundles, 0, *arguments)
    ray.get([trainer.join.remote(str(tmp_path / "meeting")), engine.info.remote()], timeout=patient(200))

    def respawn(name: str) -> ActorHandle[Any]:
        nonlocal engine
        engine = spawn(VllmEngine, bundles, 0, *arguments)
        return engine

    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine}, respawn=respawn)
        sync.connect()
        for number in range(version):
            ray.get(trainer.load.remote(str(paths[number])))
            sync.update_weights(number + 1)
        sync.settle(patient(60))
        (wanted,), answers = ray.get([engine.live.remote(), engine.answers.remote()])
        ray.get(trainer.load.remote(str(paths[version % 2])))
        os.kill(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        deadline = time.monotonic() + patient(200)
        while not sync.heals and time.monotonic() < deadline:
            sync.settle(patient(200))
        (heal,) = sync.heals
        sys.stdout.write(f"{heal}\n")
        assert (heal.version, heal.verified, set(heal.ways.values())) == (version, True, {"own"})
        (live,) = ray.get(engine.live.remote())
        assert [name for name in wanted if live[name] != wanted[name] and ".attn._" not in name] == []
        assert_same(ray.get(engine.answers.remote()), answers)
        assert sync.update_weights(version + 1).engines == {"e0": version + 1}
        assert ray.get(engine.answers.remote()) != answers
    ray.get(engine.close.remote())
    for actor in (trainer, engine):
        ray.kill(actor)
