"""A driver whose `respawn` never returns for one engine: says what came of its engines, and ends.

python -m tests.fleets.stuck ADDRESS
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import Any

import ray

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState

WIDTH = 64


def main(address: str) -> None:
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    sync = WeightSync(SyncConfig(bucket_bytes=64 << 10, respawn_timeout_s=patient(0.5), heal_backoff_s=0.05))
    sync.register_trainers([spawn(Trainer, WIDTH, "0")])
    engines = {name: spawn(Engine, WIDTH, name, name) for name in ("e0", "e1", "e2")}
    sync.register_engines(engines, respawn=respawn)
    sync.connect()
    sync.update_weights(1)
    ray.kill(engines["e1"])
    assert until(lambda: sync.engine_states()["e1"] is EngineState.DEAD, patient(60))
    ray.kill(engines["e2"])
    sync.settle(patient(60))
    states = {name: state.value for name, state in sync.engine_states().items()}
    report = sync.update_weights(2)
    ray.kill(engines["e0"])  # at the end a respawn has no deadline yet
    assert until(lambda: "e0" in calls, patient(60))
    sync.close()
    told = {"states": states, "engines": dict(report.engines), "heals": [h.engine for h in sync.heals]}
    sys.stdout.write(json.dumps(told | {"calls": calls}) + "\n")
    sys.stdout.flush()


calls: list[str] = []


def respawn(name: str) -> Any:
    calls.append(name)
    if name != "e2":
        threading.Event().wait()
    return spawn(Engine, WIDTH, name, name)


if __name__ == "__main__":
    main(sys.argv[1])
