"""`SyncConfig.prefix_cache` reaches every engine, also one that joins later, or the engine is refused."""

from __future__ import annotations

import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.caching_engine import Caching, CannotSalt
from weightsync import ConfigError, SyncConfig, WeightSync

WIDTH = 64


def test_engines_are_told_what_to_do_with_caches_when_they_join() -> None:
    trainer, plain = spawn(Trainer, WIDTH, "t"), spawn(Engine, WIDTH, "plain", "plain")
    first, second = (spawn(Caching, WIDTH, name) for name in ("e0", "e1"))
    for treatment in ("salt", "drop"):
        with WeightSync(SyncConfig(prefix_cache=treatment, bucket_bytes=4096)) as sync:
            sync.register_trainers([trainer])
            sync.register_engines({"e0": first, "plain": plain})
            sync.connect()
            sync.update_weights()
            sync.add_engine("e1", second)
            assert ray.get([each.treatment.remote() for each in (first, second)]) == [treatment] * 2


def test_an_engine_that_cannot_salt_is_refused_by_its_name() -> None:
    trainer, engines = spawn(Trainer, WIDTH, "t"), {"e0": spawn(Caching, WIDTH, "e0", CannotSalt)}
    with WeightSync(SyncConfig(prefix_cache="salt", bucket_bytes=4096)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        with pytest.raises(ConfigError, match=r"sync\.prefix_cache: 'salt'.*engine e0.*know no versions"):
            sync.connect()
    with WeightSync(SyncConfig(bucket_bytes=4096)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        assert sync.update_weights(1).engines == {"e0": 1}
