"""A driver of its own cluster, for tests that end it: prints "updating", then updates until told to stop.

python -m tests.actors.driver normal|forever
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray

from tests.actors.fleet import Engine, Trainer, spawn
from weightsync import SyncConfig, WeightSync


def main(how: str) -> None:
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": env},
    )
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers([spawn(Trainer, 64, "0")])
        sync.register_engines({f"e{i}": spawn(Engine, 64, f"e{i}", str(i)) for i in range(2)})
        sync.connect()
        version = 0
        while version < 5 or how == "forever":
            version += 1
            sync.update_weights(version)
            if version == 3:
                sys.stdout.write("updating\n")
                sys.stdout.flush()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
