"""A driver that connects actors of an existing cluster, and keeps them until its input ends.

python -m tests.fleets.claimer ADDRESS NAMESPACE [registered]
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray

from weightsync import SyncConfig, WeightSync


def main(address: str, namespace: str, how: str = "connected") -> None:
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(address, namespace=namespace, log_to_driver=False, runtime_env={"env_vars": env})
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers([ray.get_actor("trainer")])
        sync.register_engines({"e0": ray.get_actor("e0")})
        if how == "connected":
            sync.connect()
            sync.update_weights(1)
        sys.stdout.write(f"{how}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
