"""Trainers that publish when a holder of their host calls, over real Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.fleets.actors import Engine, forget, spawn, until
from tests.fleets.digesting import PLAN
from tests.fleets.digesting import Trainer as Digests
from tests.fleets.faulty import pid
from tests.fleets.gated_trainer import Gated
from tests.fleets.intercept import names_called
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.holders.weight_holder import spawn_holder
from weightsync.actors.ray import publish_relay
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.process import ask_pid
from weightsync.actors.ray.publish_relay import PublishRelay, relayed_ranks
from weightsync.actors.ray.remote import remote_holder, remote_trainer
from weightsync.actors.ray.watch import Watches
from weightsync.driver.fleet import Fleet
from weightsync.driver.verifying.trainers import Trainers
from weightsync.errors import DeadlineError, PeerError, PeerLostError
from weightsync.faults import Fault, FaultPlan

WIDTH = 64
SHORT_S = patient(1)


@pytest.fixture(scope="module")
def engine(cluster: None) -> Any:
    return spawn(Engine, WIDTH, "e0", "x0")


@pytest.fixture
def sync(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[WeightSync]:
    """A connected fleet, with the parameter as its deadline of an update."""
    timeout_s = getattr(request, "param", patient(10))
    monkeypatch.setattr(publish_relay, "MAX_DIRECT_HOSTS", 0)
    forget([engine])
    config = SyncConfig(bucket_bytes=8192, timeout_s=timeout_s, connect_timeout_s=patient(30))
    with WeightSync(config) as sync:
        sync.register_trainers([spawn(Gated, WIDTH, f"s{rank}", str(tmp_path)) for rank in range(2)])
        sync.register_engines({"e0": engine})
        sync.connect()
        yield sync
        for trainer in sync.trainers():
            ray.kill(trainer)


@pytest.fixture
def asked_directly() -> Iterator[list[str]]:
    """The trainers that the driver asks itself."""
    with names_called("publish") as names:
        yield names


def update(sync: WeightSync, version: int) -> None:
    """Train, update, and compare the engine's weights with the trainers'."""
    ray.get([trainer.train.remote(version) for trainer in sync.trainers()])
    report = sync.update_weights(version)
    assert report.verified
    assert report.engines == {"e0": version}
    assert {"trainer 0", "trainer 1"} <= report.spans.keys()
    wanted = ray.get(sync.trainers()[0].weights.remote())
    found = ray.get(sync.engines()["e0"].weights.remote())
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_trainer_that_fails_is_told_under_its_name(sync: WeightSync, asked_directly: list[str]) -> None:
    update(sync, 1)
    inject(sync, "error", 2)
    with pytest.raises(PeerError, match=r"^trainer 1 failed: RuntimeError"):
        sync.update_weights(2)
    update(sync, 3)
    inject(sync, "kill", 4)
    with pytest.raises(PeerLostError, match=r"^trainer 1 is gone"):
        sync.update_weights(4)
    assert asked_directly == []


@pytest.mark.parametrize("sync", [SHORT_S], indirect=True)
def test_a_trainer_that_is_stopped_is_told_under_its_name(
    sync: WeightSync, asked_directly: list[str]
) -> None:
    stopped = pid(sync.trainers()[1])
    inject(sync, "hang", 1)
    with pytest.raises(DeadlineError) as late:
        sync.update_weights(1)
    assert late.value.args == ("publish", ("trainer 1",), SHORT_S)
    os.kill(stopped, signal.SIGCONT)
    update(sync, 2)
    assert asked_directly == []


def inject(sync: WeightSync, action: Any, version: int) -> None:
    sync.inject(FaultPlan((Fault(process="trainer 1", action=action, at="publish", version=version),)))


def test_the_driver_asks_itself_once_the_holder_that_asked_is_killed(
    sync: WeightSync, asked_directly: list[str], tmp_path: Path
) -> None:
    update(sync, 1)
    (tmp_path / "waits").touch()
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(sync.update_weights, 2)
        assert until(lambda: len([*tmp_path.glob("* publishes")]) == 2, patient(20))
        assert asked_directly == []
        os.kill(pid(sync.holders()["holder 0"]), signal.SIGKILL)
        assert until(lambda: len(asked_directly) == 2, patient(20))
        (tmp_path / "waits").unlink()
        # It has to send what its trainer published, so the update fails, as if the driver had asked at once.
        with pytest.raises(PeerLostError, match=r"^holder 0 is gone"):
            updating.result()
    assert ray.get([trainer.published.remote() for trainer in sync.trainers()]) == [3, 3]
    update(sync, 3)
    assert sorted(asked_directly) == ["trainer 0", "trainer 1"], "the next holder asks again"


@asynccontextmanager
async def relayed(may_end: Path, timeout_s: float) -> AsyncIterator[tuple[Trainers, PublishRelay, int]]:
    """Trainers that are read in place and digest until a file is there, their relay, and its holder's pid."""
    trainers = [remote_trainer(f"trainer {rank}", ray.remote(Digests).remote(may_end)) for rank in range(2)]
    placement, links = await trainers[0].placement(), NodeLinks(None)
    holder = remote_holder("holder 0", spawn_holder("holder 0", placement, "gloo", SyncConfig()))
    links.open(holder)
    relay = PublishRelay(holder, dict(enumerate(trainers)))
    watches = Watches(patient(5))
    fleet = Fleet([(trainer, 0) for trainer in trainers], {}, [holder], relays=[relay])
    try:
        for trainer in trainers:
            links.open(trainer)
            await trainer.attach(PLAN, 0, None)
        watches.holder(holder, lambda error: links.end(holder.key, error))
        await opened(relay)
        yield Trainers(SyncConfig(timeout_s=timeout_s), fleet), relay, await ask_pid(holder.handle)
    finally:
        await watches.close()
        await links.close()
        for peer in (*trainers, holder):
            ray.kill(peer.handle)


async def opened(relay: PublishRelay) -> None:
    async with asyncio.timeout(patient(30)):
        while not relay.is_ready:
            await asyncio.sleep(0.01)


def test_a_publication_survives_the_holder_that_asked_for_it(
    tmp_path: Path, asked_directly: list[str]
) -> None:
    async def work() -> None:
        may_end = tmp_path / "may end"
        async with relayed(may_end, patient(30)) as (trainers, _, holder):
            publishing = trainers.begin(1)
            await asyncio.wait_for(publishing.readable(), patient(30))
            assert not asked_directly, "notices come, whoever asks"
            os.kill(holder, signal.SIGKILL)
            async with asyncio.timeout(patient(30)):
                while len(asked_directly) < 2:
                    await asyncio.sleep(0.01)
            may_end.touch()
            assert [*(await publishing.publication()).answers] == ["trainer 0", "trainer 1"]

    asyncio.run(work())


@pytest.mark.faults
def test_a_holder_that_is_silent_is_asked_again_once_it_goes_on(
    tmp_path: Path, asked_directly: list[str]
) -> None:
    async def work() -> None:
        may_end = tmp_path / "may end"
        may_end.touch()
        async with relayed(may_end, patient(0.5)) as (trainers, relay, holder):
            os.kill(holder, signal.SIGSTOP)
            try:
                for version in (1, 2):  # it is silent, then it has not answered yet
                    asked_directly.clear()
                    await trainers.publish(version)
                    assert asked_directly == ["trainer 0", "trainer 1"]
            finally:
                os.kill(holder, signal.SIGCONT)
            await opened(relay)
            asked_directly.clear()
            await trainers.publish(3)
            assert not asked_directly

    asyncio.run(work())


def test_only_trainers_on_many_hosts_are_asked_through_others() -> None:
    nodes = [f"host {rank % 9}" for rank in range(18)]
    assert relayed_ranks(nodes) == [[host, host + 9] for host in range(9)]
    assert relayed_ranks([node for node in nodes if node != "host 8"]) == []
