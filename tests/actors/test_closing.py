"""A WeightSync that is closed while an update runs."""

from __future__ import annotations

import ray

from tests.fleets.actors import Slowing, Trainer, spawn
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

WIDTH = 64


def test_an_update_ends_before_its_weight_sync_is_closed_so_that_no_engine_stays_paused(
    cluster: None,
) -> None:
    trainer, engine = spawn(Trainer, WIDTH, "closed-t"), spawn(Slowing, WIDTH, "e0", "closed-e0")
    sync = WeightSync(SyncConfig(bucket_bytes=4096, timeout_s=patient(10)))
    sync.register_trainers([trainer])
    sync.register_engines({"e0": engine})
    sync.connect()
    sync.update_weights()
    ray.get(engine.slow_down.remote(0.5))
    report = sync.update_weights_async()
    sync.close()
    assert ray.get(engine.sync_serving.remote()) == 2
    assert report.result(timeout=0).engines == {"e0": 2}
    for actor in (trainer, engine):
        ray.kill(actor)
