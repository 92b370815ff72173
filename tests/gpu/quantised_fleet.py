"""Trainers in bfloat16 and a quantised engine, compared with one that loaded the quantised checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import Trainer, spawn
from tests.gpu.live_bytes import Live
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.report import SyncReport

__all__ = [
    "CONFIG",
    "FP8_BLOCKS",
    "IN_PLACE",
    "NONE_CONVERTED",
    "READS_ALL",
    "Saved",
    "end",
    "feed",
    "join",
    "kill_and_wait",
    "paths_in",
]

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))
IN_PLACE = "live weights with what was quantised"
NONE_CONVERTED = {"e0": "it takes whole tensors, of which none is converted"}
READS_ALL = {"e0": "direct: none is converted"}
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
    answers: Sequence[list[Mapping[str, Any]]]
    live: Sequence[Live]

    def check(self, engine: ActorHandle[Any], number: int) -> None:
        """Compare each live byte of each rank, then tokens and log-probabilities if these are known."""
        live = ray.get(engine.live.remote())
        for held, wanted in zip(live, self.live[number], strict=True):
            differ = [name for name in wanted if held[name] != wanted[name]]
            assert [name for name in differ if ".attn._" not in name] == []  # the cache is not quantised
        if not self.answers:
            return
        answers, expected = ray.get(engine.answers.remote()), self.answers[number]
        assert [each["tokens"] for each in answers] == [each["tokens"] for each in expected]
        assert answers == expected


def paths_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of two versions, and of what is quantised of them."""
    return [folder / str(seed) for seed in range(2)], [folder / f"{seed}-packed" for seed in range(2)]


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


def kill_and_wait(sync: WeightSync, engine: ActorHandle[Any]) -> None:
    """Kill an engine, and wait until another is in its place."""
    os.kill(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    deadline = time.monotonic() + patient(200)
    while not sync.heals and time.monotonic() < deadline:
        sync.settle(patient(200))
    sys.stdout.write(f"{sync.heals}\n")
