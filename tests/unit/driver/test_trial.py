"""What a trial asks of which process, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from weightsync.config import SyncConfig
from weightsync.driver.connecting.trial import Trial, run_trial
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.errors import PeerLostError
from weightsync.plan import MAPPED, RankLayout, TensorMeta
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.handles import DeviceHandle
from weightsync.testing import LocalPeer

META = TensorMeta("w", "float32", (4,))
ON_GPU = RankLayout((META,), (), buffers=(META,), device="cuda:fake")


class Trainer:
    def __init__(self, number: int, *, empty: bool = False) -> None:
        self._handle = None if empty else DeviceHandle("cuda:fake", 0, bytes([number]), 0, 16)
        self.num_asked = 0

    def trial_handle(self) -> DeviceHandle | None:
        self.num_asked += 1
        return self._handle


class Engine:
    def __init__(self, *exports: bool) -> None:
        self._exports, self.num_asked = exports, 0

    def can_export(self) -> Sequence[bool]:
        self.num_asked += 1
        return self._exports


class Holder:
    """Fails with `reason`, if that is set."""

    def __init__(self) -> None:
        self.reason, self.tried = "", list[list[str]]()

    def try_mapping(self, memory: Mapping[str, DeviceHandle]) -> str:
        self.tried.append(sorted(memory))
        return self.reason


class Members:
    """Two trainers, the second on another host, and engines ``e0`` (two ranks, both hosts) and ``e1``."""

    def __init__(self) -> None:
        self.trainers = [Trainer(0), Trainer(1)]
        self.engines = {"e0": Engine(True, True), "e1": Engine(True)}
        self.holders = [Holder() for _ in range(5)]
        at = {"e0": (2, 3), "e1": (4,)}
        self.fleet = Fleet(
            [(LocalPeer(trainer), i) for i, trainer in enumerate(self.trainers)],
            {name: EngineMember(LocalPeer(engine), at[name]) for name, engine in self.engines.items()},
            [LocalPeer(holder) for holder in self.holders],
            list("ababa"),
        )

    def run(
        self,
        *,
        trainers: Sequence[RankLayout] = (ON_GPU, ON_GPU),
        e1: RankLayout = ON_GPU,
        mode: str = "auto",
        demoted: Mapping[str, str] | None = None,
    ) -> Trial:
        config = SyncConfig(mode=mode)  # type: ignore[arg-type]
        layouts = {"e0": [ON_GPU, ON_GPU], "e1": [e1]}
        tables = {name: [*map(LayoutTable.of, ranks)] for name, ranks in layouts.items()}
        sources = [*map(LayoutTable.of, trainers)]
        return asyncio.run(run_trial(self.fleet, config, sources, tables, demoted or {}))

    def tried(self) -> list[list[list[str]]]:
        return [holder.tried for holder in self.holders]


@pytest.fixture
def members() -> Members:
    return Members()


def test_holders_map_their_own_trainer_and_for_an_engine_all_of_their_host(members: Members) -> None:
    assert members.run() == Trial({"e0": "", "e1": ""}, {"e0": "", "e1": ""})
    first, second = [["trainer 0"]], [["trainer 1"]]
    assert members.tried() == [first, second, first, second, first]


def test_a_failure_counts_for_the_engine_of_its_holder(members: Members) -> None:
    members.holders[3].reason = "no peer access"
    trial = members.run()
    assert trial.obstacles == {"e0": "no peer access", "e1": ""}
    assert trial.failures == trial.obstacles


def test_a_failure_of_a_trainers_holder_counts_for_all(members: Members) -> None:
    members.holders[1].reason = "no peer access"
    assert set(members.run().obstacles.values()) == {"no peer access"}


def test_a_trainer_without_memory_has_nothing_to_be_tried(members: Members) -> None:
    members.fleet.trainers[0] = LocalPeer(Trainer(0, empty=True)), 0
    assert set(members.run().obstacles.values()) == {""}
    assert members.tried() == [[[]], [["trainer 1"]], [[]], [["trainer 1"]], [[]]]


def test_an_engine_with_another_obstacle_is_left_out(members: Members) -> None:
    members.engines["e0"] = engine = Engine(True, False)
    members.fleet.engines["e0"].peer = LocalPeer(engine)
    trial = members.run()
    assert "not written by its holders" in trial.obstacles["e0"]
    assert trial.obstacles["e1"] == ""
    assert trial.failures == {"e1": ""}
    assert members.tried()[2:] == [[], [], [["trainer 0"]]]


@pytest.mark.parametrize(
    "e1", [RankLayout((META,), (), buffers=(META,)), RankLayout((META,), (), device="cuda:fake")]
)
def test_an_engine_whose_layout_rules_it_out_is_not_asked(members: Members, e1: RankLayout) -> None:
    trial = members.run(e1=e1, demoted={"e0": "it was wrong"})
    assert trial.obstacles["e0"] == "it was wrong"
    assert "not written by its holders" in trial.obstacles["e1"]
    assert [engine.num_asked for engine in members.engines.values()] == [0, 0]
    assert members.tried() == [[]] * 5


@pytest.mark.parametrize("device", ["", MAPPED])
def test_without_trainers_on_gpus_or_with_broadcasts_alone_no_process_is_asked(
    members: Members, device: str
) -> None:
    on_host = RankLayout((META,), (), device=device)
    assert set(members.run(trainers=[ON_GPU, on_host]).obstacles.values()) == {
        "the trainers' weights are not read in place"
    }
    assert set(members.run(mode="broadcast").obstacles.values()) == {"sync.mode is broadcast"}
    asked = [*members.trainers, *members.engines.values()]
    assert [each.num_asked for each in asked] == [0, 0, 0, 0]
    assert members.tried() == [[]] * 5


def test_a_lost_holder_is_an_error_and_no_reason(members: Members) -> None:
    def lost(_: object) -> str:
        raise PeerLostError("holder 3", "killed")

    members.holders[3].try_mapping = lost  # type: ignore[method-assign]
    with pytest.raises(PeerLostError, match="holder 3"):
        members.run()
