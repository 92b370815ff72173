"""Reads the metrics of an update where Ray starts all of a node: python -m tests.fleets.exporting."""

from __future__ import annotations

import os
import time
import urllib.request

import ray

from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.local_cluster import ROOT
from tests.patience import patient
from weightsync import SyncConfig, WeightSync


def main() -> None:
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    engines = {name: spawn(Engine, 64, name, name) for name in ("metered", 'e"1')}
    with WeightSync(SyncConfig(timeout_s=patient(20))) as sync:
        sync.register_trainers([spawn(Trainer, 64, "t0")])
        sync.register_engines(engines)
        sync.connect()
        nbytes = sync.update_weights(7).nbytes
        text = exported('engine="metered"', time.monotonic() + patient(60))
    ray.shutdown()
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }

    def value(name: str, *tags: str) -> float:
        (found,) = (
            n for key, n in values.items() if key.startswith(f"{name}{{") and all(t in key for t in tags)
        )
        return found

    assert value("ray_weightsync_engine_version", 'engine="metered"') == 7
    assert value("ray_weightsync_engine_version", 'engine="e\\"1"') == 7
    assert value("ray_weightsync_updates_total") >= 1
    assert value("ray_weightsync_update_bytes_total") >= nbytes
    assert value("ray_weightsync_phase_seconds_count", 'phase="move"') >= 1
    assert value("ray_weightsync_move_bytes_per_second") > 0


def exported(what: str, deadline: float) -> str:
    """All that this node exports, once `what` is among it."""
    port = ray.nodes()[0]["MetricsExportPort"]
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patient(10)) as answer:
            text: str = answer.read().decode()
        if what in text:
            return text
        time.sleep(0.2)
    raise AssertionError(f"{what} is not exported")


if __name__ == "__main__":
    main()
