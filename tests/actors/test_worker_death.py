"""A real vLLM of two ranks loses the process of one: it is noticed, named, started anew, and filled."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch

from tests.fleets.ranked import VICTIM, Ranked
from tests.patience import patient
from weightsync.errors import RankLostError
from weightsync.faults import Fault

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here"),
]
ENGINE = f"engine {VICTIM}"


@dataclass(frozen=True)
class Case:
    at: Any
    action: Any
    rank: int
    bucket: Any = None

    def __str__(self) -> str:
        return "-".join(filter(None, (self.at, self.bucket, self.action, f"rank{self.rank}")))

    @property
    def fault(self) -> Fault:
        return Fault(process=ENGINE, action=self.action, at=self.at, bucket=self.bucket, rank=self.rank)


CASES = [
    *(Case("idle", action, rank) for rank in (0, 1) for action in ("kill", "hang")),
    *(Case("move", action, rank, "middle") for rank in (0, 1) for action in ("kill", "hang")),
    Case("move", "hang", 0, "first"),
    Case("move", "kill", 1, "last"),
    Case("verify", "kill", 0),
    Case("verify", "hang", 1),
    *(Case("refill", action, rank, "middle") for rank in (0, 1) for action in ("kill", "hang")),
]


@pytest.fixture(scope="module")
def fleet(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    fleet = Ranked(tmp_path_factory.mktemp("model"))
    yield fleet
    fleet.close()


@pytest.fixture
def ready(fleet: Ranked) -> Ranked:
    fleet.sync.settle(patient(120))
    fleet.update_all()
    fleet.sync.settle(patient(20))
    fleet.log.clear()
    return fleet


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_is_lost_is_named_and_its_engine_comes_back(ready: Ranked, case: Case) -> None:
    victims, num_heals, begun = ready.pids(), len(ready.sync.heals), time.monotonic()
    if case.at == "refill":  # which comes of an engine that failed
        ready.inject(Fault(process=ENGINE, at="verify", action="error", rank=1), case.fault)
    else:
        ready.inject(case.fault)
    if case.at == "idle":
        ready.be_noticed(begun)
    else:
        report = ready.update()
        assert report.engines == {"e0": ready.version, VICTIM: 0}
        named = "injected into engine e1 at verify" if case.at == "refill" else f"rank {case.rank}, is lost"
        assert named in report.failures[VICTIM]
    ready.be_healed(num_heals, case.rank, victims)
    ready.update_all()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_update_that_finds_a_rank_lost_at_its_start_goes_on_without(ready: Ranked, number: int) -> None:
    victims, num_heals = ready.pids(), len(ready.sync.heals)
    ready.signal(1, number)
    assert ready.update().engines == {"e0": ready.version, VICTIM: 0}
    ready.be_healed(num_heals, 1, victims)


def test_a_request_to_a_rank_that_is_stopped_is_told_so(ready: Ranked) -> None:
    victims, num_heals = ready.pids(), len(ready.sync.heals)
    ready.signal(0, signal.SIGSTOP)
    with pytest.raises(RankLostError, match="engine e1, rank 0, is lost") as told:
        ray.get(ready.generate(100), timeout=patient(10))
    assert told.value.rank == 0
    ready.be_noticed(time.monotonic())
    ready.be_healed(num_heals, 0, victims)


def test_a_rank_that_only_does_not_go_on_is_ended_by_the_deadline(ready: Ranked) -> None:
    victims, num_heals = ready.pids(), len(ready.sync.heals)
    ready.inject(
        Fault(process=ENGINE, action="slow", at="move", bucket="middle", rank=1, seconds=patient(60))
    )
    report = ready.update()
    assert report.engines == {"e0": ready.version, VICTIM: 0}
    assert "no answer within" in report.failures[VICTIM]
    ready.sync.settle(patient(120))
    assert len(ready.sync.heals) == num_heals + 1
    assert ready.sync.heals[-1].respawned_at is not None
    ready.update_all()
    assert not set(victims) & set(ready.pids())
