"""Weeks of updates, in small: after the tenth, nothing grows."""

from __future__ import annotations

import pytest
import ray

from tests.fleets.actors import Counting, Counts, Engine, counts, socket_folders, spawn, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

NUM_UPDATES = 500


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_five_hundred_updates_leave_memory_files_and_sockets_as_they_were() -> None:
    trainer = spawn(Counting, 256, "leak-0")
    engines = {f"e{i}": spawn(Engine, 256, f"e{i}", f"leak-{i}") for i in range(2)}
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        holders = [*sync.holders().values()]

        def look() -> dict[str, Counts]:
            asked = [actor.counts.remote() for actor in (trainer, *engines.values())]
            asked += [holder.__ray_call__.remote(lambda _: counts()) for holder in holders]
            names = ["trainer", *engines, *(f"holder {i}" for i in range(len(holders)))]
            return dict(zip(names, ray.get(asked), strict=True)) | {"driver": counts()}

        before, folders = {}, socket_folders()
        for version in range(1, NUM_UPDATES + 1):
            assert sync.update_weights(version).engines == {"e0": version, "e1": version}
            if version == 10:
                before = look()
        after = look()
    left = socket_folders() - folders
    assert until(lambda: not left & socket_folders(), patient(60)), left
    for name, then in before.items():
        now = after[name]
        assert now.num_segments == then.num_segments, name
        # Ray opens a connection now and then; a leak of ours would show some hundred times.
        assert now.num_files - then.num_files < 8, name
        # 500 updates of 270 kB each: any of them kept would be 130 MB.
        assert now.rss_kib - then.rss_kib < 16 << 10, name
    for actor in (trainer, *engines.values()):
        ray.kill(actor)
