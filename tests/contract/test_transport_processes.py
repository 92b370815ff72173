"""gloo between processes: one after another is killed or stopped, and the others go on without it."""

from __future__ import annotations

import signal

import pytest

from tests.contract.transport_processes import Fleet, lose_one_inside, lose_one_outside
from tests.patience import patient


@pytest.mark.faults
@pytest.mark.slow
def test_lost_ranks_are_named_and_the_others_go_on() -> None:
    fleet = Fleet("gloo", 4)
    try:
        lose_one_outside(fleet, 3, signal.SIGSTOP, timeout_s=patient(1))
        lose_one_inside(fleet, 1, signal.SIGKILL, timeout_s=patient(1))
        lose_one_outside(fleet, 0, signal.SIGSTOP, timeout_s=patient(1))
    finally:
        fleet.end()
