"""NCCL between processes, one GPU each: a rank is killed or stopped, and the others go on without it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.contract.transport_processes import Fleet, lose_one_inside, lose_one_outside
from tests.patience import patient

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TIMEOUT_S = patient(10)
"""Within it a communicator has to be up, too."""


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip("needs 2 GPUs")
    fleet = Fleet("nccl", num_gpus)
    yield fleet
    fleet.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, -1], ids=["host", "last"])
def test_a_rank_is_lost_in_front_of_a_broadcast(fleet: Fleet, rank: int, number: signal.Signals) -> None:
    lose_one_outside(fleet, rank % len(fleet.members), number, TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, -1], ids=["host", "last"])
def test_a_rank_is_lost_while_broadcasts_flow(fleet: Fleet, rank: int, number: signal.Signals) -> None:
    lose_one_inside(fleet, rank % len(fleet.members), number, TIMEOUT_S)


def test_membership_shrinks_to_one_and_each_process_has_one_nccl(fleet: Fleet) -> None:
    fleet.open(TIMEOUT_S)
    fleet.broadcast()
    while len(fleet.members) > 1:
        fleet.lose(len(fleet.members) - 1)
        fleet.open(TIMEOUT_S)
        fleet.broadcast(nbytes=1 << 26)
    for process in fleet.processes:
        process.order("num_nccl_libraries")
        assert process.value() == 1
