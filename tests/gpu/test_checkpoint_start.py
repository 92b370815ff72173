"""Engines on GPUs that are filled from files, read into memory or mapped where they lie."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup

from tests.fleets.actors import until
from tests.gpu.fleet import Engine, spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.holders.weight_holder import HolderStandby, spawn_standby
from weightsync.memory.tensors import named_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("place", ["disk", "/dev/shm"])
@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_checkpoints_arrive_bit_for_bit(
    bundles: PlacementGroup,
    num_gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    place: str,
) -> None:
    root = tmp_path if place == "disk" else Path(place)
    with tempfile.TemporaryDirectory(dir=root) as one, tempfile.TemporaryDirectory(dir=root) as two:
        models = {
            name: save_qwen3(Path(folder), kind, seed)
            for seed, (name, folder) in enumerate({"one": one, "two": two}.items())
        }
        engines = {f"e{i}": spawn(Engine, bundles, i, one, f"e{i}") for i in range(num_gpus)}
        with WeightSync(
            SyncConfig(bucket_bytes=4 << 20, timeout_s=patient(30), connect_timeout_s=patient(120))
        ) as sync:
            sync.register_engines(engines)
            early = note_early(monkeypatch)
            first = sync.register_checkpoint("one", [one])
            assert until(lambda: contexts(early) == [True] * num_gpus, patient(60))
            sync.connect()
            assert started_early(sync) == [True] * num_gpus
            assert (first.result().mapped_nbytes > 0) is (place == "/dev/shm")
            sync.register_checkpoint("two", [two])
            for name in ("one", "two", "one"):
                report = sync.update_weights(checkpoint=name)
                assert report.verified
                check(engines, named_tensors(models[name])[0])
            sync.unregister_checkpoint("two")
            sync.settle(patient(30))
            assert sync.heal("e0").verified  # from what holders keep, without the files
            check(engines, named_tensors(models["one"])[0])
        for engine in engines.values():
            ray.kill(engine)


def note_early(patch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that are to be holders, as they are started."""
    early: list[Any] = []
    patch.setattr(
        "weightsync.actors.holders.standbys.spawn_standby",
        lambda *at: early.append(spawn_standby(*at)) or early[-1],
    )
    return early


def contexts(early: list[Any]) -> list[bool]:
    """Of each process that is to be a holder, whether it has a context on its GPU."""

    def has_one(_: HolderStandby) -> bool:
        flags, is_active, driver = ctypes.c_uint(), ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
        driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active))
        return bool(is_active.value)

    return ray.get([standby.__ray_call__.remote(has_one) for standby in early])


def started_early(sync: WeightSync) -> list[bool]:
    """Of each holder, whether its process began on its GPU before it was known who sits there."""
    holders = [*sync.holders().values()]

    def was_standby(it: Any) -> bool:
        return isinstance(it, HolderStandby) and it.bound_to() == it.sample_memory(on=False)[0]

    return ray.get([holder.__ray_call__.remote(was_standby) for holder in holders])


def check(engines: dict[str, Engine], wanted: dict[str, torch.Tensor]) -> None:
    """Every engine holds `wanted`, bit for bit."""
    for name, engine in engines.items():
        held = ray.get(engine.weights.remote())
        assert held.keys() == wanted.keys()
        for tensor, value in wanted.items():
            assert torch.equal(held[tensor].view(torch.int16), value.view(torch.int16)), (name, tensor)
