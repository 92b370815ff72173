"""What a trainer says on its socket is enough for an update, over real Ray actors."""

from __future__ import annotations

from pathlib import Path

import ray

from tests.fleets.actors import Engine, spawn
from tests.fleets.gated_trainer import AnswersLate
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

WIDTH = 64


def test_an_update_does_not_wait_for_rays_answer(cluster: None, tmp_path: Path) -> None:
    trainer, engine = spawn(AnswersLate, WIDTH, "s0", str(tmp_path)), spawn(Engine, WIDTH, "e0", "x0")
    config = SyncConfig(bucket_bytes=8192, timeout_s=patient(10), connect_timeout_s=patient(30))
    with WeightSync(config) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        sync.update_weights(1)
        (tmp_path / "waits").touch()
        report = sync.update_weights(2)
        assert report.engines == {"e0": 2}
        assert report.verified
        assert "trainer 0" in report.spans
        assert (tmp_path / "waits").exists()
        assert (tmp_path / "s0 answers").exists(), "it has not answered yet"
        (tmp_path / "waits").unlink()
        ray.get(trainer.train.remote(3))
        assert sync.update_weights(3).engines == {"e0": 3}
    ray.kill(trainer)
    ray.kill(engine)
