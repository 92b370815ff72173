"""Three hosts with TLS: updates arrive, a killed engine comes back, and a newcomer is filled by CURVE."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from tests.certificates import run_files
from tests.fleets.actors import Engine, Trainer, until
from tests.hosts.host_copies import CONFIG
from tests.hosts.outside import put, say
from tests.patience import patient
from weightsync import WeightSync

WIDTH = 1024


def start(name: str, host: str = "west") -> Any:
    return put(host, Engine, WIDTH, name, name)


def encrypted() -> None:
    """Update three times, kill an engine, and fill another one across a link."""
    with tempfile.TemporaryDirectory(prefix="weightsync-tls-", dir="/var/tmp") as folder:  # all hosts see it
        files = run_files(Path(folder))
        with WeightSync(replace(CONFIG, refill="auto", tls=files)) as sync:
            trainer = put("head", Trainer, WIDTH, "t")
            sync.register_trainers([trainer])
            sync.register_engines({"e0": start("e0")}, respawn=start)
            sync.connect()
            for version in (1, 2, 3):
                ray.get(trainer.train.remote(version))
                assert sync.update_weights(version).verified
            sync.settle(patient(20))
            ray.kill(sync.engines()["e0"])
            assert until(lambda: bool(sync.heals), patient(60)), sync.engine_states()
            assert sync.heals[-1].verified
            joined = sync.add_engine("e1", start("e1", "east"))
            assert joined
            say(f"a newcomer was filled by {dict(joined.ways)}")
            assert {*joined.ways.values()} == {"curve"}
            ray.get(trainer.train.remote(4))
            report = sync.update_weights(4)
            assert report.verified
            assert report.engines == {"e0": 4, "e1": 4}
