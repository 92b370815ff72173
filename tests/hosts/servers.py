"""Servers and trainers on hosts without Ray: updated, cut off, started again and filled."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

import pytest
import ray
import torch

from tests.fleets.actors import Trainer, until
from tests.fleets.joined import trained
from tests.fleets.served import digest
from tests.hosts.outside import ask, put, say
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import PeerLostError, WeightSyncError
from weightsync.faults import Fault, FaultPlan

WIDTH = 256
JOIN_PORT, SERVER_PORT = 29500, 8000
ENV = {"WEIGHTSYNC_TOKEN": "a secret of the hosts", "OMP_NUM_THREADS": "1"}
OTHERS = ("west", "east")


def number(found: str) -> int:
    """Return a digest as what `ask` can answer."""
    return zlib.crc32(found.encode())


def servers() -> None:
    """Only the first host has Ray. The others' servers dial in, and get each version."""
    os.environ |= ENV
    trainer = put("head", Trainer, WIDTH, "t")
    urls = {name: f"http://10.77.0.{2 + i}:{SERVER_PORT}" for i, name in enumerate(OTHERS)}
    for name in OTHERS:
        ask("serve", name)
    config = SyncConfig(
        join_port=JOIN_PORT,
        timeout_s=patient(5),
        connect_timeout_s=patient(60),
        heartbeat_s=patient(1),
        heal_backoff_s=0.1,
        refill="zeromq",
    )
    with WeightSync(config) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(urls)
        sync.connect()
        for version in (1, 2, 3):
            update(sync, trainer, version)

        ask("unserve", "west")
        serves_only(sync, "east")
        ask("serve", "west")
        comes_back(sync, trainer)
        assert set(sync.heals[-1].ways.values()) == {"zeromq"}, sync.heals
        update(sync, trainer, 4)

        ask("cut", "east", 3600)
        serves_only(sync, "west")
        ask("mend", "east")
        comes_back(sync, trainer)
        update(sync, trainer, 5)
    trainers(config, urls)
    say("servers: updated, killed, cut off and filled")


def trainers(config: SyncConfig, urls: dict[str, str]) -> None:
    """Ranks that torchrun starts dial in, too. It starts them again after one was killed."""
    ask("torchrun", "east")
    with WeightSync(config) as sync:
        sync.register_trainers(2)
        sync.register_engines(urls)
        sync.connect()
        for seed in (1, 2, 3):
            trained_by(sync, seed)
        fault = Fault(process="trainer 1", action="kill", at="publish", version=sync.version + 1)
        sync.inject(FaultPlan((fault,)))
        with pytest.raises(PeerLostError, match="trainer 1"):
            sync.update_weights()
        trained_by(sync, 1)


def trained_by(sync: WeightSync, seed: int) -> None:
    """The servers get the weights of update `seed` of the ranks' processes."""
    serve(trained(WIDTH, seed), sync.update_weights().version)


def update(sync: WeightSync, trainer: ray.ActorHandle, version: int) -> None:
    ray.get(trainer.train.remote(version))
    report = sync.update_weights(version)
    assert report.verified
    assert report.engines == dict.fromkeys(OTHERS, version), report
    check(trainer, version)


def check(trainer: ray.ActorHandle, version: int) -> None:
    serve(ray.get(trainer.weights.remote()), version)


def serve(weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Both servers serve these weights as that version."""
    found = [(ask("version", name), ask("digest", name)) for name in OTHERS]
    assert found == [(version, number(digest(weights)))] * 2, (found, version, number(digest(weights)))


def serves_only(sync: WeightSync, name: str) -> None:
    assert until(lambda: [*sync.serving()] == [name], patient(30)), sync.engine_states()


def comes_back(sync: WeightSync, trainer: ray.ActorHandle) -> None:
    assert until(lambda: len(sync.serving()) == len(OTHERS), patient(60)), sync.engine_states()
    try:
        sync.settle(patient(30))
    except WeightSyncError as error:
        raise AssertionError(str(sync.engine_states())) from error
    check(trainer, sync.version)
