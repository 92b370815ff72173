"""Trainer ranks that Ray did not start join a driver, and wait in `update` while it moves weights."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch import nn

import weightsync
from tests.cable import Cable
from tests.fleets.actors import until
from tests.fleets.digesting import PLAN, Digesting
from tests.fleets.served import free_port
from tests.pages import run_block
from tests.patience import patient
from weightsync.actors.membership import Membership
from weightsync.actors.ray.remote import remote_trainer
from weightsync.actors.servers.door import with_ranks
from weightsync.actors.servers.peers import ServedTrainer
from weightsync.actors.servers.trainer import JoinedTrainer
from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.errors import ConfigError, DeadlineError, PeerLostError, StateError
from weightsync.node.link import Link
from weightsync.node.messages import MAX_NBYTES, JoinRank, Place, Refused
from weightsync.node.messages import joined as answered
from weightsync.node.node import Node
from weightsync.protocol.messages import PublishTask
from weightsync.protocol.stream import Stream

TOKEN = "a secret of the fleet"


class Driver:
    """The part of a driver that trainers join. An update moves nothing."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.config = SyncConfig(join_port=free_port(), connect_timeout_s=timeout_s, heartbeat_s=0.1)
        self.controller: Any = SimpleNamespace(plan="made", version=0, exclusive=self._exclusive)
        self.fleet = Fleet([], {}, [])
        self.members = Membership(self.config, self.fleet, self.controller, None)
        self.members.trainers = [*with_ranks(num_ranks, self.config)]
        self.controller.snapshot_index = SimpleNamespace(stop=self._stop)

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        yield

    async def _stop(self) -> None: ...

    async def update(self) -> None:
        async with self.members.exclusive():
            self.controller.version += 1


Test = Callable[[Driver], Coroutine[object, object, None]]


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a test with a driver of some ranks, whose processes are threads of this one."""
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    context = SimpleNamespace(get_node_id=lambda: "this node")  # else Ray would be started
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("weightsync.actors.servers.process.PAUSE_S", 0.1)
    monkeypatch.setattr("weightsync.actors.servers.process.AGAIN_S", 0.5)

    def run(test: Test, num_ranks: int = 2, timeout_s: float = patient(10)) -> None:
        async def whole() -> None:
            driver = Driver(num_ranks, timeout_s)
            monkeypatch.setenv("WEIGHTSYNC_JOIN", f"127.0.0.1:{driver.config.join_port}")
            await driver.members.follow()
            try:
                await asyncio.wait_for(test(driver), patient(30))
            finally:
                await driver.members.close()
                for trainer in joined:
                    trainer.leave()

        joined.clear()
        asyncio.run(whole())

    return run


joined: list[JoinedTrainer] = []


def rank(number: int, of: int = 2, source: Any = None) -> JoinedTrainer:
    trainer = JoinedTrainer(nn.Linear(2, 2), number, of)
    trainer.source = source
    joined.append(trainer)
    trainer.join()
    return trainer


def updating(trainer: JoinedTrainer, timeout_s: float = patient(20)) -> asyncio.Future[int]:
    return asyncio.ensure_future(asyncio.to_thread(trainer.update, timeout_s))


def test_all_ranks_wait_until_the_version_has_committed(drive: Callable[..., None]) -> None:
    async def test(driver: Driver) -> None:
        ranks = [rank(0), rank(1)]
        for version in (1, 2):
            waiting = [updating(each) for each in ranks]
            async with driver.members.exclusive():
                assert not any(each.done() for each in waiting)
                driver.controller.version += 1
            assert await asyncio.gather(*waiting) == [version, version]

    drive(test)


def test_components_that_are_updated_together_end_it_once(drive: Callable[..., None]) -> None:
    async def test(driver: Driver) -> None:
        ranks = [rank(0), rank(1)]
        for version in (1, 2):
            waiting = [updating(each) for each in ranks]
            async with driver.members.exclusive(), driver.members.exclusive():
                driver.controller.version += 1
            assert await asyncio.gather(*waiting) == [version, version]

    drive(test)


def test_the_pages_script_runs(drive: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(driver: Driver) -> None:
        names = {"model": nn.Linear(2, 2), "batches": [1, 2], "step": lambda *_: None}
        running = asyncio.ensure_future(asyncio.to_thread(lambda: run_block("docs/servers.md", 1, names)))
        for _ in names["batches"]:
            await driver.update()
        known = await running
        assert known["version"] == 2
        known["shard"].leave()

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    drive(test, num_ranks=1)


def test_a_rank_that_does_not_come_is_named_to_all_and_once_to_itself(drive: Callable[..., None]) -> None:
    async def test(driver: Driver) -> None:
        ranks = [rank(0), rank(1)]
        first, second = driver.members.trainers
        waiting = updating(ranks[0])
        await asyncio.gather(first.begin(), second.link.dialled())
        with pytest.raises(DeadlineError, match="trainer 1"):
            await driver.update()
        for told in (waiting, updating(ranks[1])):
            with pytest.raises(DeadlineError, match=r"update\(\): no answer within .* s from trainer 1"):
                await told
        again = [updating(each) for each in ranks]
        await asyncio.gather(first.begin(), second.begin())
        await driver.update()
        assert await asyncio.gather(*again) == [1, 1]

    drive(test, timeout_s=patient(0.3))


def test_a_failed_update_raises_in_the_ranks(drive: Callable[..., None]) -> None:
    async def test(driver: Driver) -> None:
        waiting = updating(rank(0, 1))
        with pytest.raises(StateError):
            async with driver.members.exclusive():
                raise StateError("an engine differs")
        with pytest.raises(StateError, match="an engine differs"):
            await waiting

    drive(test, num_ranks=1)


def test_a_rank_that_cannot_be_told_the_end_is_let_go(
    drive: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(driver: Driver) -> None:
        trainer = rank(0, 1)
        waiting = updating(trainer)
        with monkeypatch.context() as patch:
            patch.setattr("weightsync.actors.servers.rank.GRACE_S", 0.0)
            await driver.update()
        with pytest.raises(PeerLostError, match="the driver at"):
            await waiting
        again = updating(trainer)
        await driver.update()
        assert await again == 2

    drive(test, num_ranks=1)


def test_weights_in_place_are_readable_before_they_are_published(
    drive: Callable[..., None], tmp_path: Path
) -> None:
    async def test(driver: Driver) -> None:
        source = Digesting(tmp_path / "may end")
        trainer = rank(0, 1, source)
        trainer.sync_attach(PLAN, 0, None)
        waiting = updating(trainer)
        async with driver.members.exclusive():
            readable = asyncio.get_running_loop().create_future()
            link = driver.members.trainers[0].link
            publishing = asyncio.ensure_future(link.call("publish", PublishTask(count=True), readable))
            await readable
            assert not publishing.done()
            (tmp_path / "may end").touch()
            assert (await publishing).fingerprint.any()
            driver.controller.version += 1
        assert await waiting == 1
        assert (source.num_ready, source.num_published) == (1, 1)

    drive(test, num_ranks=1)


def test_the_next_process_of_a_rank_is_waited_for(drive: Callable[..., None]) -> None:
    async def test(driver: Driver) -> None:
        first = rank(0, 1)
        waiting = updating(first)
        await driver.members.trainers[0].begin()
        first.leave()
        driver.members.trainers[0].link.end(PeerLostError("trainer 0", "it was killed"))
        with pytest.raises(PeerLostError):
            await waiting
        updated = asyncio.ensure_future(driver.update())
        again = updating(rank(0, 1))
        assert await again == 1
        await updated

    drive(test, num_ranks=1)


def test_a_process_that_comes_while_an_update_fails_is_not_told_of_it(drive: Callable[..., None]) -> None:
    """Told, it would train on, a step ahead of the ranks that join after it."""

    async def test(driver: Driver) -> None:
        first, place = rank(0, 1), driver.members.trainers[0]
        waiting, lost = updating(first), PeerLostError("trainer 0", "it was killed")

        async def update() -> None:
            async with driver.members.exclusive():
                first.leave()
                place.link.end(lost)
                with pytest.raises(PeerLostError):
                    await waiting
                again.append(updating(rank(0, 1)))
                assert await asyncio.to_thread(until, lambda: place.link.is_dialled, patient(10))
                raise lost

        again: list[asyncio.Future[int]] = []
        with pytest.raises(PeerLostError, match="it was killed"):
            await update()
        await driver.update()
        assert await again[0] == 1

    drive(test, num_ranks=1)


@pytest.mark.parametrize("commits", [True, False])
def test_a_process_whose_weights_an_update_read_is_told_of_its_end(
    drive: Callable[..., None], commits: bool
) -> None:
    """An update that connects takes the next process of a rank. Not told, it would wait for another one."""

    async def test(driver: Driver) -> None:
        first, place = rank(0, 1), driver.members.trainers[0]
        waiting, failure = updating(first), StateError("engines are gone")

        async def update() -> None:
            async with driver.members.exclusive():
                first.leave()
                place.link.end(PeerLostError("trainer 0", "it was killed"))
                with pytest.raises(PeerLostError):
                    await waiting
                again.append(updating(rank(0, 1)))
                peer = remote_trainer("trainer 0", place)
                await peer.placement()
                peer.node = place.link
                driver.fleet.trainers[:] = [(peer, 0)]
                if not commits:
                    raise failure
                driver.controller.version += 1

        again: list[asyncio.Future[int]] = []
        if commits:
            await update()
            assert await again[0] == 1
        else:
            with pytest.raises(StateError, match="engines are gone"):
                await update()
            with pytest.raises(StateError, match="engines are gone"):
                await again[0]

    drive(test, num_ranks=1)


@pytest.mark.parametrize("is_killed", [False, True], ids=["closes", "is killed"])
def test_ranks_are_let_go_if_the_driver(
    is_killed: bool, drive: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(driver: Driver) -> None:
        waiting = updating(rank(0, 1))
        await driver.members.trainers[0].begin()
        if is_killed:  # it says nothing
            monkeypatch.setattr(Link, "end", lambda *_: None)
        await driver.members.close()
        with pytest.raises(PeerLostError, match="the driver at"):
            await waiting

    drive(test, num_ranks=1)


def test_a_driver_whose_name_only_has_an_address_of_ipv6_is_joined(
    drive: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo
    names = {"driver.local": "::1"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **given: found(names.get(host, host), *more, **given)
    )
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "::1")

    async def test(driver: Driver) -> None:
        monkeypatch.setenv("WEIGHTSYNC_JOIN", f"driver.local:{driver.config.join_port}")
        waiting = updating(rank(0, 1))
        assert (await driver.members.trainers[0].placement()).address == "::1"
        await driver.update()
        assert await waiting == 1

    drive(test, num_ranks=1)


def ask(driver: Driver, process: str) -> Place | Refused:
    """Ask for the place of the only rank, as `JoinedProcess` does."""
    stream = Stream(f"tcp://127.0.0.1:{driver.config.join_port}", TOKEN, MAX_NBYTES, patient(5))
    stream.send(msgspec.msgpack.encode(JoinRank(0, 1, process)))
    came = stream.receive(patient(5))
    stream.close()
    assert came
    return answered(came)


def test_of_two_processes_that_ask_at_once_the_one_that_dials_first_keeps_the_place(
    drive: Callable[..., None],
) -> None:
    async def test(driver: Driver) -> None:
        nodes = list[Node]()
        for name in ("first", "second"):
            place = await asyncio.to_thread(ask, driver, name)
            assert isinstance(place, Place)
            nodes.append(Node(place.offer, None, ServedTrainer, None, name))
        first, second = nodes
        running = asyncio.ensure_future(asyncio.to_thread(first.run))
        await asyncio.wrap_future(first.welcomed)
        with pytest.raises(StateError, match="another process has this place"):
            await asyncio.to_thread(second.run)
        refused = await asyncio.to_thread(ask, driver, "second")
        assert refused == Refused("another process is trainer 0")
        assert driver.members.trainers[0].link.is_dialled
        first.stop()
        await running

    drive(test, num_ranks=1)


def test_a_process_that_is_refused_asks_again_on_one_connection(drive: Callable[..., None]) -> None:
    """It may wait for weeks, as a server that is not registered yet: the driver stores each proof."""

    async def test(driver: Driver) -> None:
        first = rank(0, 1)
        waiting = updating(first)
        await driver.members.trainers[0].begin()
        async with Cable(f"tcp://127.0.0.1:{driver.config.join_port}") as cable:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WEIGHTSYNC_JOIN", cable.endpoint)
                second = rank(0, 1)
            assert await asyncio.to_thread(until, lambda: cable.recorded.count(b"join_rank") > 3, patient(10))
            assert not cable.has_dials(2)
            first.leave()
            driver.members.trainers[0].link.end(PeerLostError("trainer 0", "it was killed"))
            with pytest.raises(PeerLostError):
                await waiting
            again = updating(second)
            await driver.update()
            assert await again == 1

    drive(test, num_ranks=1)


def test_a_process_asks_again_whatever_has_failed(
    drive: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async def test(driver: Driver) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "create_connection", fail)
            waiting = updating(rank(0, 1))
            assert await asyncio.to_thread(
                until, lambda: "can't start new thread" in caplog.text, patient(10)
            )
        await driver.update()
        assert await waiting == 1

    drive(test, num_ranks=1)


def test_bad_places_are_named(
    drive: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(trainer: JoinedTrainer, why: str) -> None:
        assert await asyncio.to_thread(until, lambda: why in caplog.text, patient(10)), caplog.text
        with pytest.raises(DeadlineError, match=why):
            await updating(trainer, 0.01)

    async def test(driver: Driver) -> None:
        waiting = updating(rank(0))
        await driver.members.trainers[0].begin()
        await refused(rank(0), "another process is trainer 0")
        await refused(rank(1, 3), "it is rank 1 of 3; registered: 2 ranks")
        await refused(rank(2, 2), "it is rank 2 of 2; registered: 2 ranks")
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a secret of somebody else")
        await refused(rank(1), "is WEIGHTSYNC_TOKEN the same there")
        assert not waiting.done()
        driver.members.trainers = []
        await driver.members.follow()
        with pytest.raises(PeerLostError):
            await waiting
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
        await refused(rank(3, 4), "it is rank 3 of 4; registered: 0 ranks")

    drive(test)


@pytest.mark.parametrize(
    ("env", "options", "named"),
    [
        ({"WEIGHTSYNC_JOIN": ""}, {}, "WEIGHTSYNC_JOIN"),
        ({"WEIGHTSYNC_JOIN": "10.0.0.1"}, {}, "WEIGHTSYNC_JOIN.*such as 10.0.0.1:29500"),
        ({"WEIGHTSYNC_JOIN": "10.0.0.1:295000"}, {}, "WEIGHTSYNC_JOIN"),
        ({"WEIGHTSYNC_JOIN": "fd00::1:29500"}, {}, "WEIGHTSYNC_JOIN"),
        ({"WEIGHTSYNC_JOIN": "[fd00::1:29500"}, {}, "WEIGHTSYNC_JOIN"),
        ({"WEIGHTSYNC_JOIN": "driver..local:29500"}, {}, "WEIGHTSYNC_JOIN"),
        ({"WEIGHTSYNC_TOKEN": "short"}, {}, "WEIGHTSYNC_TOKEN"),
        ({"RANK": "2"}, {}, "RANK.*WORLD_SIZE is 2"),
        ({"RANK": "one"}, {}, "RANK"),
        ({}, {"exclud": "a"}, "exclude"),
    ],
)
def test_a_bad_environment_is_named(
    env: dict[str, str], options: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"WEIGHTSYNC_JOIN": "127.0.0.1:1", "WEIGHTSYNC_TOKEN": TOKEN, "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (good | env).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        weightsync.join(nn.Linear(2, 2), **options)


@pytest.mark.parametrize("number", [0, -1, True])
def test_a_bad_number_of_ranks_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="trainers"):
        with_ranks(number, SyncConfig(join_port=29500))
    with pytest.raises(ConfigError, match=r"sync\.join_port"):
        with_ranks(2, SyncConfig())
