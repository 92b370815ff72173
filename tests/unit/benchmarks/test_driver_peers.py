"""The driver's costs are counted, and the fleet that causes them is one that the driver accepts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks import bench_driver
from benchmarks.driver_ledger import Ledger, Wire
from benchmarks.driver_peers import make_fleet
from weightsync.actors.ray import publish_relay
from weightsync.config import SyncConfig
from weightsync.driver.updating.controller import Controller
from weightsync.errors import VerifyError

NUM_TENSORS, NUM_TRAINERS, NUM_ENGINES = 12, 10, 2
NUM_HOLDERS = NUM_TRAINERS + 8 * NUM_ENGINES
FLEET = {"ranks": NUM_TRAINERS, "engines": NUM_ENGINES, "tensors": NUM_TENSORS}


class Echo:
    """A peer that returns what it is given."""

    def echo(self, value: object) -> object:
        return value


def test_a_call_is_counted_in_both_directions_and_its_answer_is_a_copy() -> None:
    ledger = Ledger()
    peer, given = Wire(Echo(), ledger), np.arange(1000)
    got = asyncio.run(peer.echo(given))
    assert (got == given).all()
    assert not np.shares_memory(got, given)
    cost = ledger.taken().costs["echo"]
    assert cost.calls == 1
    assert given.nbytes < min(cost.nbytes_in, cost.nbytes_out) < given.nbytes + 500
    assert not ledger.costs


def test_a_stored_value_is_pickled_once_and_counted_once_a_host() -> None:
    ledger, given = Ledger(), np.arange(1000)
    stored = ledger.share(given)
    peers = [Wire(Echo(), ledger, host) for host in ("a", "a", "b")]
    assert all((asyncio.run(peer.echo(stored)) == given).all() for peer in peers)
    assert ledger.costs["share"].calls == 1
    assert ledger.costs["share"].nbytes_out == 0
    assert 2 * given.nbytes < ledger.costs["echo"].nbytes_out < 2 * (given.nbytes + 500)


@pytest.mark.parametrize(
    ("mode", "colocated", "shards"),
    [
        ("broadcast", False, NUM_TRAINERS),
        ("direct", False, NUM_TRAINERS),
        ("direct", True, NUM_TRAINERS),
        ("direct", False, NUM_TRAINERS // 2),
    ],
)
def test_a_fleet_connects_and_takes_verified_updates(
    mode: str, colocated: bool, shards: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(
        bench_driver.measure_fleet(FLEET | {"mode": mode, "colocated": colocated, "shards": shards}, 2, 60.0)
    )
    phases = ("connect", "update", "snapshots", "connect: plan", "update: verify")
    shown = capsys.readouterr().out
    assert [phase for phase in phases if f'"phase": "{phase}", ' not in shown] == []
    assert ("one holder plans its messages" in shown) == (mode == "direct")


def test_calls_and_bytes_of_an_update_are_those_of_the_fleet() -> None:
    async def work(num_tensors: int) -> Ledger:
        ledger = Ledger()
        config = SyncConfig.from_dict({"mode": "broadcast"})
        fleet = make_fleet(num_tensors, NUM_TRAINERS, NUM_ENGINES, ledger)
        controller = Controller(config, fleet)
        await controller.connect()
        await controller.snapshot_index.settled()
        ledger.clear()
        await controller.update(1)
        taken = ledger.taken()
        await controller.snapshot_index.settled()
        return taken

    costs, of_more = (asyncio.run(work(number)).costs for number in (NUM_TENSORS, 20 * NUM_TENSORS))
    assert {name: cost.calls for name, cost in costs.items()} == {
        "publish": NUM_TRAINERS,
        "pause": NUM_ENGINES,
        "move": NUM_HOLDERS,
        "load": NUM_ENGINES,
        "resume": NUM_ENGINES,
    }
    for name in ("publish", "load"):
        assert costs[name].nbytes_in == of_more[name].nbytes_in


def test_with_many_hosts_a_publication_has_one_call_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_relay, "MAX_DIRECT_HOSTS", 3)

    async def work() -> Ledger:
        ledger = Ledger()
        controller = Controller(SyncConfig(), make_fleet(NUM_TENSORS, 32, NUM_ENGINES, ledger))
        await controller.connect()
        await controller.snapshot_index.settled()
        ledger.clear()
        report = await controller.update(1)
        assert {f"holder {i}" for i in range(32 + 8 * NUM_ENGINES)} <= report.spans.keys()
        return ledger.taken()

    calls = {name: cost.calls for name, cost in asyncio.run(work()).costs.items()}
    per_engine = dict.fromkeys(("pause", "load", "resume"), NUM_ENGINES)
    assert calls == {"publish_all": 4, "move": 32 + 8 * NUM_ENGINES, **per_engine}


def test_wrong_digests_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        fleet = make_fleet(NUM_TENSORS, NUM_TRAINERS, NUM_ENGINES, Ledger())
        # One rank fewer publishes: its share is missing in what engines are compared with.
        controller = Controller(SyncConfig(min_engines=NUM_ENGINES), fleet)
        await controller.connect()
        fleet.trainers.pop()
        await controller.update(1)

    with pytest.raises(VerifyError):
        asyncio.run(work())


def test_fleets_grow_up_to_what_was_asked() -> None:
    assert [bench_driver.sizes(ranks) for ranks in (1000, 100, 30, 10, 4)] == [
        [10, 100, 1000],
        [10, 100],
        [10, 30],
        [10],
        [4],
    ]
