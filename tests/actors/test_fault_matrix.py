"""What fails, at every place and in every way, whole hosts too: the next version comes with right bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fleets.actors import until
from tests.fleets.faulty import Faulty, end, healthy, process_state
from tests.patience import patient
from weightsync.faults import Fault
from weightsync.report import SyncReport

pytestmark = pytest.mark.timeout(120)

THIRDS = ("first", "middle", "last")
SLOW_S = 0.5


@dataclass(frozen=True)
class Case:
    process: str
    at: Any
    action: Any
    bucket: Any = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.process.replace(" ", ""), self.at, self.bucket, self.action)))

    @property
    def fault(self) -> Fault:
        return Fault(process=self.process, at=self.at, action=self.action, bucket=self.bucket, seconds=SLOW_S)

    @property
    def served(self) -> str:
        """The engine that it is about."""
        return {"holder 0": "e0", "holder 2": "e1"}.get(self.process) or self.process.split(" ")[1]


def _cases() -> Iterator[Case]:
    rough = ("kill", "hang", "error")
    for process in ("engine e0", "engine e1", "holder 0", "holder 1", "holder 2", "trainer 0", "trainer 1"):
        kind, few = process.split(" ")[0], process in ("engine e0", "trainer 1")
        for action in ("kill", "hang"):
            yield Case(process, "idle", action)
        if few:
            continue
        places = {"engine": ("pause", "verify", "commit"), "holder": ("commit",), "trainer": ("publish",)}
        for at in places[kind]:
            if process != "holder 2":  # it keeps nothing
                yield from (Case(process, at, action) for action in rough)
        if kind == "trainer":
            continue
        for at in ("move",) if process == "holder 1" else ("move", "refill"):
            for bucket in THIRDS:
                yield from (Case(process, at, action, bucket) for action in rough)
                # What corrupts finds bytes that came from elsewhere, so not in each of their buckets.
                if process != "holder 1" and (process, at) != ("holder 0", "move"):
                    yield Case(process, at, "corrupt", bucket)
        yield Case(process, "move", "slow")
        if kind == "engine":
            yield Case(process, "move", "drop")


FEW = [
    Case("engine e1", "move", "kill", "middle"),
    Case("engine e1", "move", "corrupt", "last"),
    Case("engine e1", "refill", "kill", "first"),
    Case("engine e1", "commit", "error"),
    Case("holder 2", "refill", "corrupt", "middle"),
    Case("holder 1", "idle", "kill"),
    Case("trainer 0", "publish", "error"),
]


class Fleets:
    """One for all cases, as long as it comes through."""

    def __init__(self) -> None:
        self._fleet: Faulty | None = None

    def take(self) -> Faulty:
        fleet, self._fleet = self._fleet or Faulty(), None
        return fleet

    def give_back(self, fleet: Faulty) -> None:
        self._fleet = fleet

    def close(self) -> None:
        if self._fleet:
            self._fleet.close()


@pytest.fixture(scope="module")
def fleets(cluster: None) -> Iterator[Fleets]:
    made = Fleets()
    yield made
    made.close()


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_fault_is_survived(fleets: Fleets, case: Case) -> None:
    _survive(fleets, case)


@pytest.mark.faults
@pytest.mark.parametrize("case", [*_cases()], ids=str)
def test_each_fault_at_each_place_is_survived(fleets: Fleets, case: Case) -> None:
    _survive(fleets, case)


def _survive(fleets: Fleets, case: Case) -> None:
    fleet = fleets.take()
    try:
        _suffer(fleet, case)
    except BaseException:
        fleet.close()
        raise
    fleets.give_back(fleet)


def _suffer(fleet: Faulty, case: Case) -> None:
    fleet.update_all()
    fleet.settle()
    fleet.log.clear()
    victim, num_heals = fleet.pid(case.process), len(fleet.sync.heals)
    if case.at == "refill":  # which comes of an engine that failed
        fleet.inject(Fault(process=f"engine {case.served}", at="verify", action="error"), case.fault)
    else:
        fleet.inject(case.fault)
    if case.at == "idle":
        _be_noticed(fleet, case, victim, num_heals)
    else:
        _update(fleet, case)
    fleet.check()
    fleet.settle()
    _assert_it_struck(fleet, case, victim)
    if case.process.startswith("trainer") and case.action != "error":
        end(victim)
        fleet.replace_trainers()
    fleet.update_all()
    fleet.settle()
    assert healthy(fleet)
    assert until(lambda: not process_state(victim) or case.action not in ("kill", "hang"), patient(5))


def test_an_engine_that_dies_with_its_holder_is_healed_without_an_update(fleets: Fleets) -> None:
    fleet = fleets.take()
    fleet.update_all()
    fleet.settle()
    num_heals = len(fleet.sync.heals)
    for process in ("holder 2", "engine e1"):
        end(fleet.pid(process))
    assert until(lambda: len(fleet.sync.heals) > num_heals, patient(20))
    fleet.settle()
    assert healthy(fleet)
    assert fleet.sync.heals[-1].version == fleet.version
    fleet.update_all()
    fleets.give_back(fleet)


def _be_noticed(fleet: Faulty, case: Case, victim: int, num_heals: int) -> None:
    assert until(lambda: process_state(victim) in ("", "stopped"), patient(3))
    if case.process.startswith("engine"):
        assert until(lambda: len(fleet.sync.heals) > num_heals, patient(20))
        assert healthy(fleet)
        assert fleet.sync.heals[-1].engine == case.served
        return
    outcome = fleet.update()
    if case.process.startswith("trainer"):
        assert case.process in str(outcome)


def _update(fleet: Faulty, case: Case) -> None:
    outcome = fleet.update()
    if isinstance(outcome, SyncReport):
        fleet.settle()
        if not _waits_for_the_next_version(case):
            assert healthy(fleet)
            assert set(fleet.sync.engine_versions().values()) == {fleet.version}, fleet.log.text()
    else:
        assert case.process.startswith(("holder", "trainer")), outcome


def _waits_for_the_next_version(case: Case) -> bool:
    """It did not pause, and serves on what it has; or its own holder, which it is filled through, is lost."""
    through = case.at == "refill" and case.process.startswith("holder") and case.action in ("kill", "hang")
    return through or (case.at, case.action) == ("pause", "error")


def _assert_it_struck(fleet: Faulty, case: Case, victim: int) -> None:
    if case.action in ("kill", "hang"):
        assert process_state(victim) in ("", "stopped")
    wanted = {
        "error": f"injected into {case.process} at {case.at}",
        "corrupt": "wrong bytes",
        "drop": "no answer within",
    }
    assert wanted.get(case.action, "") in fleet.log.text()


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("when", ["idle", "phases", "checkpoint", "deaf"])
def test_lost_hosts_are_survived_and_several_read_a_checkpoint(when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleets.nodes", when],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=patient(380),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
