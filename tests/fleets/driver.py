"""A driver of its own cluster, for tests that end it in the midst of an update or of a connect.

python -m tests.fleets.driver normal|forever|connecting
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import ray

from tests.fleets.actors import Deaf, Engine, Trainer, spawn
from tests.fleets.local_cluster import start_ray
from weightsync import SyncConfig, WeightSync


def main(how: str) -> None:
    start_ray()
    engine = Deaf if how == "connecting" else Engine
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers([spawn(Trainer, 64, "0")])
        sync.register_engines({f"e{i}": spawn(engine, 64, f"e{i}", str(i)) for i in range(2)})
        if how == "connecting":
            threading.Thread(target=say_when_there_are_sockets, daemon=True).start()
        sync.connect()
        version = 0
        while version < 5 or how == "forever":
            version += 1
            sync.update_weights(version)
            if version == 3:
                say_so()
    ray.shutdown()


def say_when_there_are_sockets() -> None:
    while not list(Path(tempfile.gettempdir()).glob("weightsync-*/feed")):
        time.sleep(0.05)
    say_so()


def say_so() -> None:
    sys.stdout.write("now\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
