"""Tokens between ranks whose GPUs read each other's memory, also of several ranks on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.expert_cases import CASES
from tests.gpu.expert_processes import Ranks, ranks
from tests.patience import patient

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[1, 2, 4])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    path = tmp_path_factory.mktemp("experts") / "store"
    with ranks(request.param, path, timeout_s=patient(15)) as started:
        yield started


@pytest.mark.parametrize("name", [*CASES, "large"])
def test_rows_are_bitwise_those_of_the_cpu_and_sums_are_close(fleet: Ranks, name: str) -> None:
    fleet.run("matches_the_cpu", name)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_is_replayed_with_other_tokens(fleet: Ranks, fp8: bool) -> None:
    fleet.run("replays_a_graph", fp8)


def test_a_capture_is_refused_if_memory_must_grow(fleet: Ranks) -> None:
    fleet.run("refuses_to_grow_in_a_capture")


def test_ranks_that_pause_get_the_rows_of_the_step(fleet: Ranks) -> None:
    fleet.run("pauses_between_steps")


def test_all_ranks_close_together(tmp_path: Path) -> None:
    with ranks(2, tmp_path / "store", num_sms=2) as started:
        started.run("matches_the_cpu", "bfloat16")
        started.run("closes")


@pytest.mark.parametrize("check", [True, False])
def test_a_killed_rank_is_named_by_the_deadline(tmp_path: Path, check: bool) -> None:
    timeout_s = patient(1)
    with ranks(3, tmp_path / "store", timeout_s=timeout_s) as started:
        started.run("makes_groups")
        pid = started.processes[1]
        pid.kill()
        pid.join()
        for missing, seconds in started.run("misses", check, on=(0, 2)):
            assert missing == ("rank 1",)
            assert timeout_s * 0.9 < seconds < timeout_s + patient(5)
