"""The public door on GPUs: FSDP2 shards to engines beside them and elsewhere, and holders that are killed."""

from __future__ import annotations

import os
import signal
import statistics
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import Engine, Trainer, spawn
from tests.patience import patient
from weightsync import PeerLostError, SyncConfig, SyncReport, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.faults import Fault, FaultPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]


class Fleet:
    """`num_trainers` ranks on the first GPUs; `engine_gpus` says where the engines are."""

    def __init__(
        self,
        bundles: PlacementGroup,
        path: str,
        num_trainers: int,
        engine_gpus: list[int],
        dtype: str = "bfloat16",
        source: str = "device",
    ) -> None:
        self.path = path
        self.trainers = [
            spawn(Trainer, bundles, i, path, i, num_trainers, dtype, source) for i in range(num_trainers)
        ]
        ray.get([trainer.join.remote(f"{path}/meeting") for trainer in self.trainers])
        self.engines = {f"e{i}": spawn(Engine, bundles, i, path, f"e{i}") for i in engine_gpus}

    def register(self, sync: WeightSync) -> None:
        sync.register_trainers(self.trainers)
        sync.register_engines(self.engines)

    def train(self, seed: int) -> None:
        ray.get([trainer.train.remote(seed) for trainer in self.trainers])

    def check(self) -> None:
        """Every engine holds the trainers' weights, bit for bit."""
        wanted = ray.get([trainer.weights.remote() for trainer in self.trainers])[0]
        for name, engine in self.engines.items():
            held = ray.get(engine.weights.remote())
            assert held.keys() == wanted.keys()
            for tensor, value in wanted.items():
                assert torch.equal(held[tensor].view(torch.int16), value.view(torch.int16)), (name, tensor)

    def close(self) -> None:
        for actor in (*self.trainers, *self.engines.values()):
            ray.kill(actor)


@dataclass(frozen=True)
class Case:
    """Who sits where, and what the trainers hold."""

    num_trainers: int
    engine_gpus: list[int]
    dtype: str
    source: str
    mode: Literal["auto", "broadcast"]


@pytest.fixture(
    params=[
        ("colocated", "bfloat16", "device", "auto"),
        ("colocated", "bfloat16", "device", "broadcast"),
        ("colocated", "float32", "device", "broadcast"),
        ("colocated", "bfloat16", "host", "auto"),
        ("apart", "bfloat16", "device", "auto"),
        ("apart", "bfloat16", "device", "broadcast"),
        ("apart", "float32", "host", "broadcast"),
        ("overlapping", "bfloat16", "device", "auto"),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, num_gpus: int) -> Case:
    """On whatever number of GPUs there is."""
    placement, dtype, source, mode = request.param
    if placement == "colocated":
        return Case(num_gpus, list(range(num_gpus)), dtype, source, mode)
    if num_gpus == 1:
        pytest.skip("needs another GPU")
    if placement == "apart":
        return Case(num_gpus // 2, list(range(num_gpus // 2, num_gpus)), dtype, source, mode)
    return Case(num_gpus - 1, list(range(1, num_gpus)), dtype, source, mode)


def test_each_version_arrives_bit_for_bit(case: Case, bundles: PlacementGroup, path: str) -> None:
    fleet = Fleet(bundles, path, case.num_trainers, case.engine_gpus, case.dtype, case.source)
    config = SyncConfig(
        mode=case.mode, bucket_bytes=4 << 20, timeout_s=patient(30), connect_timeout_s=patient(60)
    )
    with WeightSync(config) as sync:
        fleet.register(sync)
        sync.connect()
        for version in (1, 2, 3):
            fleet.train(version)
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {dict(report.phases)}\n")
            assert report.verified
            assert set(report.engines.values()) == {version}
            direct = (case.mode, case.source) == ("auto", "device")
            assert (report.num_buckets > 8) != direct
            assert all((route == "direct") == direct for route in report.routes.values()), report.routes
            fleet.check()
        assert report.connect_phases["warm_up"] > 0
    fleet.close()


@pytest.mark.parametrize("stage", ["host", "device"])
@pytest.mark.parametrize(
    ("source", "dtype"), [("device", "bfloat16"), ("device", "float32"), ("turns", "bfloat16")]
)
def test_each_staged_version_arrives_bit_for_bit(
    bundles: PlacementGroup,
    num_gpus: int,
    path: str,
    source: str,
    dtype: str,
    stage: Literal["host", "device"],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet(bundles, path, num_gpus, list(range(num_gpus)), dtype, source)
    config = SyncConfig(
        stage=stage, bucket_bytes=4 << 20, timeout_s=patient(30), connect_timeout_s=patient(60)
    )
    with WeightSync(config) as sync:
        fleet.register(sync)
        sync.connect()
        for version in (1, 2, 3):
            fleet.train(version)
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {dict(report.phases)}\n")
            assert report.verified
            assert report.phases["stage"] > 0
            assert set(report.engines.values()) == {version}
            assert "direct" not in report.routes.values()
            fleet.check()
        assert "from its host" not in caplog.text, "a holder did not bring a version to its GPU"
    fleet.close()


def test_what_another_holder_of_the_host_staged_is_mapped(
    bundles: PlacementGroup, num_gpus: int, path: str
) -> None:
    if num_gpus < 2:
        pytest.skip("needs another GPU")
    fleet = Fleet(bundles, path, 1, [0, 1])
    config = SyncConfig(
        stage="host", bucket_bytes=4 << 20, timeout_s=patient(30), connect_timeout_s=patient(60)
    )
    with WeightSync(config) as sync:
        fleet.register(sync)
        sync.connect()
        for version in (1, 2, 3):
            fleet.train(version)
            assert set(sync.update_weights(version).engines.values()) == {version}
            fleet.check()
    fleet.close()


def test_no_update_pays_for_the_first_use_and_memory_stays_flat(
    bundles: PlacementGroup, num_gpus: int, path: str
) -> None:
    fleet = Fleet(bundles, path, num_gpus, list(range(num_gpus)))
    with WeightSync(
        SyncConfig(bucket_bytes=16 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))
    ) as sync:
        fleet.register(sync)
        sync.connect()
        moves, used = [], []
        for version in range(1, 61):
            moves.append(sync.update_weights(version).phases["move"])
            if version in (5, 60):
                used.append(max(ray.get([trainer.device_nbytes.remote() for trainer in fleet.trainers])))
        assert moves[0] < 5 * statistics.median(moves) + 0.02
        assert used[1] - used[0] < 4 << 20
        fleet.check()
    fleet.close()


def start_and_kill(sync: WeightSync, version: int, victim: Any) -> Future[SyncReport]:
    """Begin an update, and kill the victim's process while the engines are being written."""
    pid = pid_of(victim)
    update = ThreadPoolExecutor(1).submit(sync.update_weights, version)
    while set(sync.engine_states().values()) != {EngineState.WRITING}:
        assert not update.done()
    os.kill(pid, signal.SIGKILL)
    return update


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


MANY_BUCKETS = SyncConfig(
    mode="broadcast", bucket_bytes=64 << 10, timeout_s=patient(20), connect_timeout_s=patient(60)
)


def test_a_holder_killed_in_an_update_is_named_and_the_next_update_works(
    bundles: PlacementGroup, num_gpus: int, path: str
) -> None:
    fleet = Fleet(bundles, path, num_gpus, list(range(num_gpus)))
    with WeightSync(MANY_BUCKETS) as sync:
        fleet.register(sync)
        sync.connect()
        sync.update_weights(1)
        fleet.train(2)
        holders = [*sync.holders().values()]
        before = [pid_of(holder) for holder in holders[:-1]]
        lost = start_and_kill(sync, 2, holders[-1]).exception(timeout=patient(30))
        assert isinstance(lost, PeerLostError), lost
        assert f"holder {num_gpus - 1}" in str(lost)
        fleet.train(3)
        report = sync.update_weights(2)
        assert set(report.engines.values()) == {2}
        assert set(sync.engine_states().values()) == {EngineState.SERVING}
        assert [pid_of(holder) for holder in holders[:-1]] == before
        fleet.check()
    fleet.close()


def test_a_trainer_killed_while_it_is_read_leaves_nothing_unproven_serving(
    bundles: PlacementGroup, num_gpus: int, path: str
) -> None:
    fleet = Fleet(bundles, path, num_gpus, list(range(num_gpus)))
    with WeightSync(replace(MANY_BUCKETS, mode="direct")) as sync:
        fleet.register(sync)
        sync.connect()
        sync.update_weights(1)
        sync.inject(FaultPlan((Fault(process="trainer 0", action="kill", at="publish", version=2),)))
        with pytest.raises(PeerLostError, match="trainer 0"):
            sync.update_weights(2)
        assert set(sync.engine_states().values()) <= {EngineState.STALE, EngineState.DEAD}
    fleet.close()


def test_an_engine_killed_while_its_memory_is_written_harms_nobody_else(
    bundles: PlacementGroup, num_gpus: int, path: str
) -> None:
    fleet = Fleet(bundles, path, num_gpus, list(range(num_gpus)))
    last = num_gpus - 1
    with WeightSync(MANY_BUCKETS) as sync:
        fleet.register(sync)
        sync.connect()
        holders = [*sync.holders().values()]
        before = [pid_of(holder) for holder in holders]
        fleet.train(1)
        update = start_and_kill(sync, 1, fleet.engines.pop(f"e{last}"))
        if num_gpus == 1:
            assert isinstance(update.exception(timeout=patient(30)), PeerLostError)
        else:
            assert set(update.result(timeout=patient(30)).engines.values()) == {0, 1}
            fleet.check()
        fleet.engines[f"e{last}"] = newcomer = spawn(Engine, bundles, last, path, f"e{last}")
        sync.add_engine(f"e{last}", newcomer)
        fleet.train(2)
        assert set(sync.update_weights(2).engines.values()) == {2}
        assert [pid_of(holder) for holder in holders] == before
        fleet.check()
    fleet.close()
