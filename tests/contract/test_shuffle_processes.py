"""A shuffle between processes over gloo, bit for bit."""

from __future__ import annotations

import pytest

from tests.contract.transport_processes import Fleet, lose_one_that_passes_on
from tests.patience import patient
from tests.shuffle_cases import CASES, make_case

pytestmark = pytest.mark.slow

ROWS, MAX_MESSAGE_BYTES = 1031, 64 << 10


@pytest.mark.parametrize(
    "name", ["copies", *(pytest.param(name, marks=pytest.mark.faults) for name in ("apart", "both"))]
)
def test_every_receiver_has_what_it_wants_and_nothing_else(name: str) -> None:
    num_senders, num_receivers, both = CASES[name]
    fleet = Fleet("gloo", num_senders if both else num_senders + num_receivers)
    try:
        fleet.open(patient(20))
        answers = fleet.shuffle(name, ROWS, MAX_MESSAGE_BYTES)
    finally:
        fleet.end()
    plan = make_case(name, ROWS).plan(MAX_MESSAGE_BYTES)
    assert plan.num_rounds >= 5
    for answer in answers:
        assert answer["right"] == [True] * 3
        assert answer["digest"] == plan.digest()
        assert 0 < answer["staging"] <= (1 + both) * 2 * MAX_MESSAGE_BYTES


@pytest.mark.faults
def test_who_passes_messages_on_and_is_lost_is_named_and_the_others_go_on() -> None:
    fleet = Fleet("gloo", 4)
    try:
        lose_one_that_passes_on(fleet, 2, timeout_s=patient(1))
    finally:
        fleet.end()
