"""Engines of several dtypes over Ray: each holds the trainers' values as its own dtype has them."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle
from transformers import AutoModelForCausalLM

from tests.fleets.actors import spawn, until
from tests.models import build_tiny_qwen3, build_tiny_router
from tests.pages import run_block
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, TrainerShard, WeightSync

CONFIG = SyncConfig(
    bucket_bytes=64 << 10,
    timeout_s=patient(30),
    connect_timeout_s=patient(120),
    heartbeat_s=patient(1),
    heal_backoff_s=0.1,
)


class Fleet:
    """A trainer in float32, and engines that are given as (kind, dtype) by name."""

    def __init__(self, path: Path, engines: Mapping[str, tuple[str, str]], frozen: tuple[str, ...]) -> None:
        from tests.fleets.dtype_actors import DtypeTrainer

        self.path, self.kinds = str(path), engines
        self.trainer = spawn(DtypeTrainer, self.path, "float32", frozen)
        self.engines: dict[str, ActorHandle[Any]] = {}
        self.sync = WeightSync(CONFIG)
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines({name: self.spawn(name) for name in engines}, respawn=self.spawn)

    def spawn(self, name: str) -> ActorHandle[Any]:
        from tests.fleets.dtype_actors import DtypeEngine

        kind, dtype = self.kinds[name]
        options = {"dtype": dtype} | ({"max_model_len": 64} if kind == "vllm" else {})
        self.engines[name] = spawn(DtypeEngine, kind, self.path, name, options, name)
        return self.engines[name]

    def update(self, version: int, start: str = "") -> None:
        ray.get(self.trainer.train.remote(version, start))
        assert self.sync.update_weights(version).engines == dict.fromkeys(self.kinds, version)
        self.check()

    def check(self, *names: str) -> None:
        """Compare each live byte with the trainer's value, cast once."""
        trained = ray.get(self.trainer.weights.remote())
        for name in names or self.kinds:
            live = ray.get(self.engines[name].live.remote())
            assert len(live.keys() & trained.keys()) > 5
            for tensor in live.keys() & trained.keys():
                wanted = trained[tensor].to(live[tensor].dtype)
                assert torch.equal(live[tensor].view(torch.uint8), wanted.view(torch.uint8)), (name, tensor)

    def kill(self, name: str) -> None:
        os.kill(ray.get(self.engines[name].pid.remote()), signal.SIGKILL)

    def close(self) -> None:
        self.sync.close()
        for each in (*self.engines.values(), self.trainer):
            ray.kill(each)


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    build, engines, frozen = request.param
    build(tmp_path / "model")
    made = Fleet(tmp_path / "model", engines, frozen)
    yield made
    made.close()


TORCH = {"half": ("torch", "float16"), "brain": ("torch", "bfloat16"), "single": ("torch", "float32")}


@pytest.mark.faults
@pytest.mark.parametrize("fleet", [(build_tiny_qwen3, TORCH, ("model.embed_tokens.*",))], indirect=True)
def test_a_killed_engine_comes_back_in_its_own_dtype(fleet: Fleet) -> None:
    fleet.sync.connect()
    fleet.update(1)
    fleet.update(2, "model.layers")  # the embedding is frozen, and tied to the head
    conversions = {row.engine: row.conversion for row in fleet.sync.coverage()}
    assert conversions == {
        "half": "cast: 24 tensors from float32 to float16 at the engine",
        "brain": "cast: 24 tensors from float32 to bfloat16 at the engine",
        "single": "identity",
    }
    for number, name in enumerate(fleet.kinds, 1):
        fleet.kill(name)
        assert until(lambda number=number: len(fleet.sync.heals) == number, patient(60))
        assert fleet.sync.heals[-1].verified
        fleet.check()
    fleet.update(3, "model.layers")


VLLM = {"e0": ("vllm", "bfloat16"), "e1": ("torch", "float32")}


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
@pytest.mark.parametrize(
    ("fleet", "told"),
    [
        (
            (build_tiny_router, {"e0": VLLM["e0"]}, ()),
            "cast: 23 tensors from float32 to bfloat16 at the source; load",
        ),
        ((build_tiny_router, VLLM, ()), "cast: 23 tensors from float32 to bfloat16 at the engine; load"),
    ],
    indirect=["fleet"],
    ids=["alone", "beside float32"],
)
def test_a_vllm_in_bfloat16_keeps_its_router_in_float32(fleet: Fleet, told: str) -> None:
    fleet.sync.connect()
    for version in (1, 2):
        fleet.update(version)
    live, trained = ray.get([fleet.engines["e0"].live.remote(), fleet.trainer.weights.remote()])
    router = [name for name in live if ".mlp.gate." in name]
    assert len(router) == 2
    assert all(torch.equal(live[name], trained[name]) for name in router)
    assert live["model.norm.weight"].dtype == torch.bfloat16
    assert fleet.sync.coverage()[0].conversion == told
    fleet.kill("e0")
    assert until(lambda: bool(fleet.sync.heals), patient(120))
    fleet.check()


@pytest.mark.slow
def test_the_pages_block_says_what_is_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_tiny_qwen3(tmp_path / "model")
    names: dict[str, Any] = {"ray": ray, "torch": torch, "WeightSync": WeightSync}
    names |= {"EngineActor": EngineActor, "TrainerShard": TrainerShard, "path": str(tmp_path / "model")}
    names |= {"AutoModelForCausalLM": AutoModelForCausalLM}
    names = run_block("docs/components.md", 1, names)
    printed = capsys.readouterr().out
    page = Path("docs/components.md").read_text(encoding="utf-8")
    for line in ("small", "exact"):
        (said,) = re.findall(f"^{line}, model.*$", page, re.M)
        assert said in printed
    for each in ("trainer", "small", "exact"):
        ray.kill(names[each])
