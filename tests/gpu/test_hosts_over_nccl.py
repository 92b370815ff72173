"""Direct updates between hosts over NCCL: GPUs of one host whose nodes have different names."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.gpu.test_end_to_end import Fleet, start_and_kill
from tests.patience import patient
from weightsync import PeerLostError, SyncConfig, WeightSync
from weightsync.driver.connecting.connect import Connection, connect
from weightsync.driver.fleet import Fleet as DriversFleet
from weightsync.plan.direct.alike import LEAST_ALIKE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(
    mode="direct", bucket_bytes=4 << 20, timeout_s=patient(30), connect_timeout_s=patient(60), keep_versions=1
)


def on_hosts(patch: pytest.MonkeyPatch, hosts: str) -> None:
    """Whenever somebody connects, its holders, in the order of their GPUs, are on these hosts."""

    async def renamed(fleet: DriversFleet, *args: Any) -> Connection:
        fleet.nodes[:] = hosts
        return await connect(fleet, *args)

    patch.setattr("weightsync.driver.updating.controller.connect", renamed)


@pytest.mark.parametrize(
    ("num_trainers", "engine_gpus", "hosts", "least_alike"),
    [
        (1, [1], "ab", LEAST_ALIKE),
        (2, [0, 1], "ab", LEAST_ALIKE),
        (2, [0, 1], "ab", 1000),
        (1, [1, 2], "abb", LEAST_ALIKE),
        (2, [2, 3], "aabb", LEAST_ALIKE),
        (2, [1, 2, 3], "aabb", LEAST_ALIKE),
        (2, [1, 2, 3], "aabb", 1000),
    ],
    ids=["apart", "colocated", "colocated-one-by-one", "passed-on", "two-and-two", "both", "both-one-by-one"],
)
def test_each_version_arrives_bit_for_bit(
    num_trainers: int,
    engine_gpus: list[int],
    hosts: str,
    least_alike: float,
    bundles: PlacementGroup,
    num_gpus: int,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if num_gpus < len(hosts):
        pytest.skip(f"needs {len(hosts)} GPUs")
    monkeypatch.setattr("weightsync.plan.direct.alike.LEAST_ALIKE", least_alike)
    fleet = Fleet(bundles, path, num_trainers, engine_gpus)
    with WeightSync(CONFIG) as sync:
        fleet.register(sync)
        on_hosts(monkeypatch, hosts)
        sync.connect()
        used = []
        for version in range(1, 9):
            fleet.train(version)
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {dict(report.phases)}\n")
            assert report.verified
            assert set(report.engines.values()) == {version}
            assert set(report.routes.values()) == {"direct"}
            used.append(max(ray.get([trainer.device_nbytes.remote() for trainer in fleet.trainers])))
            if version in (1, 2, 8):
                fleet.check()
        assert max(used[2:]) - used[1] < 4 << 20
        links = sync.links()
        assert sum(link.nbytes for link in links) == len(engine_gpus) * report.nbytes
        # In each of the cases the hosts lack one model together, and what a host lacks crosses once.
        assert sum(link.nbytes for link in links if link.distance == "other host") == report.nbytes
    fleet.close()


@pytest.mark.parametrize("victim", [0, 1], ids=["sends", "receives"])
def test_a_holder_killed_between_messages_is_named_and_the_next_update_works(
    victim: int, bundles: PlacementGroup, num_gpus: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_gpus < 2:
        pytest.skip("needs another GPU")
    fleet = Fleet(bundles, path, 1, [1])
    with WeightSync(replace(CONFIG, bucket_bytes=64 << 10, timeout_s=patient(20))) as sync:
        fleet.register(sync)
        on_hosts(monkeypatch, "ab")
        sync.connect()
        sync.update_weights(1)
        fleet.train(2)
        lost = start_and_kill(sync, 2, sync.holders()[f"holder {victim}"]).exception(timeout=patient(60))
        assert isinstance(lost, PeerLostError), lost
        assert f"holder {victim}" in str(lost)
        fleet.train(3)
        report = sync.update_weights(2)
        assert set(report.routes.values()) == {"direct"}
        assert set(report.engines.values()) == {2}
        fleet.check()
    fleet.close()
