"""Trainers in bfloat16 and a quantised engine, compared with one that loaded the quantised checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import Trainer, spawn
from tests.gpu.live_bytes import Live
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import Answers, assert_same
from tests.patience import patient
from tests.quantised import save_quantised
from weightsync import SyncConfig, WeightSync
from weightsync.plan.layout.formats import Format
from weightsync.quantising.quantize import quantize
from weightsync.report import SyncReport

__all__ = [
    "CONFIG",
    "FP8_BLOCKS",
    "IN_PLACE",
    "NONE_CONVERTED",
    "READS_ALL",
    "Begin",
    "Saved",
    "assert_quantised_alike",
    "end",
    "feed",
    "join",
    "kill_and_fill",
    "save_versions",
    "serve_stored",
]

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))
IN_PLACE = "live weights with what was quantised"
NONE_CONVERTED = {"e0": "it takes whole tensors, of which none is converted"}
READS_ALL = {"e0": "direct: none is converted"}
Begin = Callable[[], ActorHandle[Any]]
"""Starts an engine."""
FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(4)],
}


@dataclass(frozen=True)
class Saved:
    """Two versions of a model, and what an engine says and holds that loaded them quantised.

    `answers` is empty where an engine does not answer alike twice.
    """

    paths: Sequence[Path]
    packed: Sequence[Path]
    answers: Sequence[Answers]
    live: Sequence[Live]

    def check(self, engine: ActorHandle[Any], number: int) -> None:
        """Compare each live byte of each rank, then tokens and log-probabilities if these are known."""
        live = ray.get(engine.live.remote())
        for held, wanted in zip(live, self.live[number], strict=True):
            differ = [name for name in wanted if held[name] != wanted[name]]
            assert [name for name in differ if ".attn._" not in name] == []  # the cache is not quantised
        if self.answers:
            assert_same(ray.get(engine.answers.remote()), self.answers[number])


def save_versions(
    folder: Path, kind: str, quantization: dict[str, Any] | None = None
) -> tuple[list[Path], list[Path]]:
    """Save two versions of a model, also quantised if that is asked for. Returns the folders of both."""
    paths = [folder / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(path, kind, seed)
    if quantization is None:
        return paths, paths
    packed = [folder / f"{seed}-packed" for seed in range(2)]
    for path, target in zip(paths, packed, strict=True):
        save_quantised(path, target, quantization)
    return paths, packed


def join(
    bundles: PlacementGroup, path: Path, folder: Path, num_ranks: int, quantization: Mapping[str, Any] | None
) -> list[ActorHandle[Any]]:
    """Trainers of a model in bfloat16, each on a GPU of its own."""
    arguments = num_ranks, "bfloat16", "device", quantization
    trainers = [spawn(Trainer, bundles, rank, str(path), rank, *arguments) for rank in range(num_ranks)]
    ray.get([each.join.remote(str(folder / "meeting")) for each in trainers], timeout=patient(200))
    return trainers


def feed(trainers: Sequence[ActorHandle[Any]], engine: ActorHandle[Any], saved: Saved) -> list[SyncReport]:
    """Update an engine three times, and compare it after each. Returns the reports."""
    ray.get(engine.info.remote(), timeout=patient(200))
    reports = []
    with WeightSync(CONFIG) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        for version, number in enumerate((0, 1, 0), start=1):
            ray.get([trainer.load.remote(str(saved.paths[number])) for trainer in trainers])
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {report.routes} {report.proofs} {dict(report.phases)}\n")
            assert report.engines == {"e0": version}
            saved.check(engine, number)
            reports.append(report)
    return reports


def end(engine: ActorHandle[Any], *others: ActorHandle[Any]) -> None:
    ray.get(engine.close.remote())
    for actor in (engine, *others):
        ray.kill(actor)


def serve_stored(saved: Saved, begin: Begin) -> None:
    """Update twice from checkpoints as they are stored, the second time in place, kill, and update again."""
    engine = begin()
    ray.get(engine.info.remote(), timeout=patient(200))

    def respawn(name: str) -> ActorHandle[Any]:
        nonlocal engine
        engine = begin()
        return engine

    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine}, respawn=respawn)
        for number, packed in enumerate(saved.packed):
            sync.register_checkpoint(str(number), [str(packed)], stored=True)
        sync.connect()

        def update(number: int) -> None:
            report = sync.update_weights(checkpoint=str(number))
            sys.stdout.write(f"{report} {report.routes} {report.proofs} {dict(report.phases)}\n")
            assert (report.routes, report.proofs) == (NONE_CONVERTED, {"e0": IN_PLACE})
            saved.check(engine, number)

        for number in range(2):
            update(number)
        sync.settle(patient(60))
        _kill_and_wait(sync, engine)
        (heal,) = sync.heals
        assert (heal.version, heal.verified) == (2, True)
        saved.check(engine, 1)
        update(0)
    end(engine)


def kill_and_fill(
    begin: Begin,
    paths: Sequence[Path],
    version: int,
    bundles: PlacementGroup,
    folder: Path,
    answers_alike: bool = True,
) -> None:
    """Kill an engine at `version`: its holder's copy fills the next one. The trainer has gone on.

    `answers_alike`: whether an engine answers alike twice.
    """
    engine = begin()
    ray.get(engine.info.remote(), timeout=patient(200))
    (trainer,) = join(bundles, paths[0], folder, 1, None)

    def respawn(name: str) -> ActorHandle[Any]:
        nonlocal engine
        engine = begin()
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
        _kill_and_wait(sync, engine)
        (heal,) = sync.heals
        assert (heal.version, heal.verified, set(heal.ways.values())) == (version, True, {"own"})
        (live,) = ray.get(engine.live.remote())
        assert [name for name in wanted if live[name] != wanted[name] and ".attn._" not in name] == []
        if answers_alike:
            assert_same(ray.get(engine.answers.remote()), answers)
        assert sync.update_weights(version + 1).engines == {"e0": version + 1}
        assert ray.get(engine.answers.remote()) != answers
    end(engine, trainer)


def assert_quantised_alike(
    kernel: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    form: Format,
    special: float,
    columns: int,
    dtype: torch.dtype,
) -> None:
    """Compare an engine's kernel with ours. A special value is in one element, and in all of them."""
    draw = torch.Generator("cuda").manual_seed(columns)
    for seed in range(4):
        weight = torch.randn(1536, columns, generator=draw, device="cuda") * 10.0 ** (seed - 4)
        weight = weight.to(dtype)
        weight[7, 5] = special
        for matrix in (weight, torch.full_like(weight, special)):
            values, scale = kernel(matrix)
            (_, found), (_, found_scale) = quantize(matrix, form)
            assert torch.equal(found_scale, scale)
            assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


def _kill_and_wait(sync: WeightSync, engine: ActorHandle[Any]) -> None:
    """Kill an engine, and wait until another is in its place."""
    os.kill(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    deadline = time.monotonic() + patient(200)
    while not sync.heals and time.monotonic() < deadline:
        sync.settle(patient(200))
    sys.stdout.write(f"{sync.heals}\n")
