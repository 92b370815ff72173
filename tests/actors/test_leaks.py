"""Weeks of updates and of kills, in small: nothing that stays alive grows."""

from __future__ import annotations

import pytest
import ray

from tests.fleets.actors import Counting, Counts, Engine, counts, socket_folders, spawn, until
from tests.fleets.faulty import Faulty, end, healthy
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


NUM_KILLS = 50


def _look(fleet: Faulty) -> dict[str, Counts]:
    holders = [*fleet.sync.holders().values()]
    asked = [trainer.counts.remote() for trainer in fleet.trainers]
    asked += [holder.__ray_call__.remote(lambda _: counts()) for holder in holders]
    names = [f"trainer {i}" for i in range(len(fleet.trainers))]
    names += [f"holder {i}" for i in range(len(holders))]
    return dict(zip(names, ray.get(asked), strict=True)) | {"driver": counts()}


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_fifty_kills_leave_memory_files_and_sockets_as_they_were(cluster: None) -> None:
    fleet = Faulty()
    before, folders = {}, socket_folders()
    for number in range(1, NUM_KILLS + 1):
        fleet.update_all()
        fleet.settle()
        num_heals = len(fleet.sync.heals)
        end(fleet.pid(f"engine e{number % 2}"))
        assert until(lambda done=num_heals: len(fleet.sync.heals) > done, patient(30))
        fleet.settle()
        assert healthy(fleet)
        if number == 10:
            before = _look(fleet)
    after = _look(fleet)
    fleet.close()
    left = socket_folders() - folders
    assert until(lambda: not left & socket_folders(), patient(60)), left
    for name, then in before.items():
        now = after[name]
        assert now.num_segments == then.num_segments, name
        # Ray opens a connection now and then; a leak of ours would show forty times.
        assert now.num_files - then.num_files < 12, (name, then, now)
        assert now.rss_kib - then.rss_kib < 24 << 10, (name, then, now)
