"""A shuffle between GPUs over NCCL, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contract.transport_processes import Fleet
from tests.shuffle_cases import make_case

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    fleet = Fleet("nccl", 2)
    yield fleet
    fleet.end()


def test_between_two_gpus_every_byte_arrives(fleet: Fleet) -> None:
    """Many small rounds between ranks that both send and receive, then few large ones one way."""
    for name, rows, max_message_bytes in (("both", 10_007, MIB), ("one", 400_003, 64 * MIB)):
        fleet.open(20)
        answers = fleet.shuffle(name, rows, max_message_bytes)
        plan = make_case(name, rows).plan(max_message_bytes)
        assert plan.num_rounds > 2
        assert [answer["right"] for answer in answers] == [[True] * 3] * 2
        assert {answer["digest"] for answer in answers} == {plan.digest()}
        num_roles = 2 if name == "both" else 1
        for answer in answers:
            assert 0 < answer["staging"] <= num_roles * 2 * max_message_bytes
        seconds = max(answer["seconds"] for answer in answers)
        print(f"{name}: {plan.nbytes / 1e6:.0f} MB in {plan.num_rounds} rounds, {seconds * 1e3:.1f} ms")  # noqa: T201
