"""Direct updates between hosts, through the controller: real holders and gloo, memory mapped by doubles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.hosts_fleet import Hosts, drive
from tests.patience import patient
from weightsync.collectives.shuffle import Shuffle
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.errors import ConfigError, PeerLostError, PlanError, TransportError
from weightsync.memory.kernels.host_copies import AddressCopies
from weightsync.plan.cross_host import host_bundles
from weightsync.plan.cross_host.cross_host import CrossHostTerms
from weightsync.plan.direct import alike
from weightsync.plan.direct.alike import AlikeReshard
from weightsync.testing import LocalPeer

CONFIG = SyncConfig(bucket_bytes=4096, timeout_s=patient(15), connect_timeout_s=patient(20), keep_versions=1)


@pytest.mark.parametrize(
    ("trainers", "engines", "crossed"),
    [
        ("aaa", {"e0": "bb"}, 1),
        ("aaa", {"e0": "b", "e1": "c"}, 2),
        ("aaa", {"e0": "bb", "e1": "bb"}, 1),
        ("aaa", {"e0": "bc"}, None),
        ("aab", {"e0": "bb", "e1": "aa"}, None),
    ],
)
def test_every_rank_gets_its_part_from_wherever_it_is(
    trainers: str, engines: dict[str, str], crossed: int | None
) -> None:
    """Uneven rows to tensor-parallel ranks, replicated heads and tied tensors among them."""

    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            assert await loop.update(version) == dict.fromkeys(engines, "direct")
        assert not any(holder.transports for holder in loop.holders)
        if crossed:
            assert loop.crossed() == crossed * loop.size
        check_links(loop, trainers, engines)

    drive(work, trainers, engines, CONFIG)


def check_links(loop: Hosts, trainers: str, engines: dict[str, str]) -> None:
    """Each rank's links bring the bytes that it needs, and none crosses from a trainer on its own host."""
    for name, on in engines.items():
        links = [link for link in loop.controller.links() if link.target.startswith(f"engine {name} ")]
        needed = [
            sum(link.nbytes for link in links if link.target.endswith(f"rank {r}")) for r in range(len(on))
        ]
        assert needed == loop.needed(name)
        for rank, host in enumerate(on):
            its = [
                link for link in links if link.target.endswith(f"rank {rank}") and "trainer" in link.source
            ]
            near = {f"trainer {number}" for number, home in enumerate(trainers) if home == host}
            assert {link.source in near for link in its if link.distance == "other host"} <= {False}
            assert {link.source in near for link in its if link.distance != "other host"} <= {True}


@pytest.mark.parametrize(
    ("trainers", "engines", "crossed"),
    [
        ("aaa", {"e0": "bb"}, 1),
        ("aaab", {"e0": "cc", "e1": "dd"}, 2),
        ("ab", {"e0": "cd", "e1": "cd"}, None),
        ("aab", {"e0": "aa", "e1": "bb", "e2": "cc"}, None),
        ("abb", {"e0": "ab", "e1": "cb"}, None),
    ],
)
def test_tensors_that_are_cut_alike_are_planned_once(
    trainers: str, engines: dict[str, str], crossed: int | None
) -> None:
    async def work(loop: Hosts) -> None:
        with (
            mock.patch.object(alike, "LEAST_ALIKE", 1.1),
            mock.patch.object(host_bundles, "LEAST_SHARE_NBYTES", 64),
            mock.patch.object(
                AlikeReshard, "reads", autospec=True, side_effect=AlikeReshard.reads
            ) as planned,
        ):
            await loop.controller.connect()
            assert planned.call_count == 2, "one of each rank"
        for version in (1, 2):
            assert await loop.update(version) == dict.fromkeys(engines, "direct")
        if crossed:
            assert loop.crossed() == crossed * loop.size
        check_links(loop, trainers, engines)
        loop.respawn("e0")
        await loop.controller.adopt("e0")
        assert await loop.update(3) == dict.fromkeys(engines, "direct")

    drive(work, trainers, engines, CONFIG)


@pytest.mark.parametrize("least_alike", [1.1, 1000], ids=["in kinds", "one by one"])
@pytest.mark.parametrize(
    ("trainers", "engines", "crossed"),
    [("aabb", {"e0": "aa", "e1": "bb"}, 0), ("aab", {"e0": "bc"}, None)],
)
def test_replicas_are_read_where_they_are_near(
    trainers: str, engines: dict[str, str], crossed: int | None, least_alike: float
) -> None:
    """Trainers hold two shards of each tensor, each on two ranks or on one."""

    async def work(loop: Hosts) -> None:
        with mock.patch.object(alike, "LEAST_ALIKE", least_alike):
            await loop.controller.connect()
            for version in (1, 2):
                assert await loop.update(version) == dict.fromkeys(engines, "direct")
        if crossed is not None:
            assert loop.crossed() == crossed * loop.size
        check_links(loop, trainers, engines)
        digested = [np.count_nonzero(source.publish(False).digests) for source in loop.sources]
        assert min(digested) > 0, "replicas take turns"

    drive(work, trainers, engines, CONFIG, num_shards=2)


def test_one_update_serves_near_far_and_by_broadcast() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            routes = await loop.update(version)
            assert (routes["near"], routes["far"]) == ("direct", "direct")
            assert "not written by its holders" in routes["alone"]
        links = loop.controller.links()
        assert {link.distance for link in links if link.target == "engine near rank 0"} == {"same host"}
        assert {link.source[:7] for link in links if link.target == "engine far rank 0"} == {"trainer"}
        assert {link.source[:6] for link in links if link.target == "engine alone rank 0"} == {"holder"}

    drive(work, "aaa", {"near": "a", "far": "b", "alone": "b"}, CONFIG, alone=["alone"])


def test_an_engine_that_takes_no_part_is_left_as_it_is_and_its_holders_pass_on_what_others_need() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)
        held = [{n: m.copy() for n, m in rank.memory.items()} for rank in loop.engines["e1"].ranks]
        pause, loop.engines["e1"].pause = loop.engines["e1"].pause, refuse  # type: ignore[method-assign]
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 1}
        assert loop.wrong("e0") == []
        for rank, before in zip(loop.engines["e1"].ranks, held, strict=True):
            assert all(np.array_equal(memory, before[name]) for name, memory in rank.memory.items())
        loop.engines["e1"].pause = pause  # type: ignore[method-assign]
        await loop.update(3)

    drive(work, "aa", {"e0": "bb", "e1": "bb"}, CONFIG)


def refuse(mode: str, timeout_s: float) -> None:
    raise TransportError("it does not pause")


@pytest.mark.parametrize("victim", [0, 2], ids=["sends", "receives"])
def test_a_holder_lost_in_the_middle_of_the_messages_is_named_and_the_next_update_is_right(
    victim: int,
) -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)
        whole = loop.fleet.holders[victim]

        class Dying:
            """Its process ends between two rounds."""

            def move(self, *args: object) -> None:
                exchange = loop.holders[victim].cross_host
                assert exchange
                assert exchange.shuffle
                assert exchange.shuffle.num_rounds > 3
                transport, started = exchange.transport, []

                def start(ops: object) -> object:
                    started.append(ops)
                    if len(started) == 3:
                        transport.close()
                    return begin(ops)

                begin, transport.start = transport.start, start  # type: ignore[method-assign, assignment]
                with pytest.raises(TransportError):
                    loop.holders[victim].move(*args)  # type: ignore[arg-type]
                raise PeerLostError(f"holder {victim}", "killed")

            def abort(self, cause: str) -> None:
                raise PeerLostError(f"holder {victim}", "killed")

        loop.fleet.holders[victim] = LocalPeer(Dying())
        with pytest.raises(PeerLostError, match=f"holder {victim}"):
            await loop.update(2)
        assert not loop.controller.connected
        assert {member.record.state for member in loop.fleet.engines.values()} == {EngineState.STALE}
        loop.fleet.holders[victim] = whole
        await loop.controller.connect()
        assert await loop.update(3) == {"e0": "direct", "e1": "direct"}

    drive(work, "aa", {"e0": "b", "e1": "a"}, CONFIG, hidden=400)


def test_a_holder_that_does_not_come_to_the_messages_is_told_by_its_rank_within_the_deadline() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)

        class Silent:
            """It answers when all is over."""

            def move(self, *_: object) -> None:
                raise TransportError("came too late") from None

            def __getattr__(self, name: str) -> object:
                return getattr(loop.holders[2], name)

        whole, loop.fleet.holders[2] = loop.fleet.holders[2], LocalPeer(Silent())
        with pytest.raises(TransportError, match=r"rank 2 of 4 did not come.*ranks are holders 0, 1, 2, 3"):
            await loop.update(2)
        loop.fleet.holders[2] = whole
        await loop.controller.connect()
        await loop.update(3)

    drive(work, "aa", {"e0": "bb"}, replace(CONFIG, timeout_s=patient(1)))


def test_a_member_that_plans_other_messages_is_named() -> None:
    async def work(loop: Hosts) -> None:
        class Other:
            """It plans messages of another size."""

            def exchange(self, terms: CrossHostTerms, *parts: Any) -> object:
                return loop.holders[0].exchange(replace(terms, max_message_bytes=2048), *parts)

            def __getattr__(self, name: str) -> object:
                return getattr(loop.holders[0], name)

        loop.fleet.holders[0] = LocalPeer(Other())
        with pytest.raises(PlanError, match=r"holder 0.*planned other messages to holder 2"):
            await loop.controller.connect()

    drive(work, "aa", {"e0": "bb"}, CONFIG)


def test_an_update_plans_nothing_and_takes_no_memory() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)
        made = "made in an update"
        with (
            mock.patch.object(CrossHostTerms, "plan", side_effect=AssertionError(made)),
            mock.patch.object(Shuffle, "__init__", side_effect=AssertionError(made)),
            mock.patch.object(AddressCopies, "__init__", side_effect=AssertionError(made)),
            mock.patch("weightsync.collectives.shuffle.torch.empty", side_effect=AssertionError(made)),
        ):
            await loop.update(2)

    drive(work, "ab", {"e0": "bb", "e1": "bc"}, CONFIG)


def test_what_messages_may_take_is_bounded_and_without_room_for_them_there_are_broadcasts() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)
        for holder in loop.holders:
            if holder.cross_host and holder.cross_host.shuffle:
                assert 0 < holder.cross_host.shuffle.staging_nbytes <= 8192
        assert loop.controller.plan
        assert loop.controller.plan.slots == 0

    drive(work, "aaa", {"e0": "bb"}, replace(CONFIG, max_staging_bytes=8192))

    async def crowded(loop: Hosts) -> None:
        await loop.controller.connect()
        routes = await loop.update(1)
        assert "sync.max_staging_bytes" in routes["e0"]
        assert "messages between hosts" in routes["e0"]

    crowd = {"e0": "b", "e1": "b"}
    drive(crowded, "aaa", crowd, replace(CONFIG, max_staging_bytes=8200), alone=["e1"])

    async def too_small(loop: Hosts) -> None:
        with pytest.raises(ConfigError, match=r"sync\.max_staging_bytes: 2000 .*sync\.mode.*engines e0"):
            await loop.controller.connect()
        assert not any(holder.transports for holder in loop.holders), "there was no second opening"

    drive(too_small, "aaa", {"e0": "bb"}, replace(CONFIG, max_staging_bytes=2000))

    async def refused(loop: Hosts) -> None:
        with pytest.raises(ConfigError, match=r"sync\.mode.*engine e0: sync\.max_staging_bytes"):
            await loop.controller.connect()

    drive(refused, "aaa", {"e0": "bb"}, replace(CONFIG, max_staging_bytes=2000, mode="direct"))


def test_one_that_takes_anothers_place_gets_what_that_one_got() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)
        loop.respawn("e1")
        await loop.controller.adopt("e1")
        assert await loop.update(2) == {"e0": "direct", "e1": "direct"}
        assert loop.controller.connected

    drive(work, "aa", {"e0": "bb", "e1": "bb"}, CONFIG)


def test_one_whose_ranks_sit_otherwise_has_all_connect_anew(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)
        epoch = loop.controller.connection().plan.epoch
        loop.respawn("e0", holders=(3, 2))
        await loop.controller.adopt("e0")
        assert await loop.update(2) == {"e0": "direct"}
        assert "connects the fleet again: what it needs of other hosts was not planned" in caplog.text
        assert loop.controller.connection().plan.epoch == epoch + 1

    drive(work, "aa", {"e0": "bb"}, CONFIG)


def test_one_on_a_holder_that_came_later_is_adopted_and_gets_messages_once_all_connect() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        await loop.update(1)
        loop.respawn("e1", on="c")
        loop.controller.connected = False  # as whoever starts a holder does
        await loop.controller.adopt("e1")
        assert loop.fleet.engines["e1"].attached
        await loop.controller.connect()
        assert await loop.update(2) == {"e0": "direct", "e1": "direct"}

    drive(work, "aa", {"e0": "b", "e1": "b"}, CONFIG)


def test_wrong_bytes_of_a_message_are_found_and_that_engine_takes_broadcasts_from_then_on() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        exchange = loop.holders[3].cross_host
        assert exchange
        move = exchange.move

        def wrong(wanted: object) -> None:
            move(wanted)  # type: ignore[arg-type]
            loop.engines["e1"].ranks[0].memory["norm"][0] ^= 1

        exchange.move = wrong  # type: ignore[method-assign, assignment]
        loop.train()
        report = await loop.controller.update(1)
        assert report.states == {"e0": "SERVING", "e1": "STALE"}
        await loop.controller.connect()
        routes = await loop.update(2)
        assert routes["e0"] == "direct"
        assert "what it read was wrong" in routes["e1"]

    drive(work, "aa", {"e0": "b", "e1": "b"}, CONFIG)
