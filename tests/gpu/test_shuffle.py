"""A shuffle between GPUs over NCCL, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contract.transport_processes import Fleet
from tests.shuffle_cases import make_case

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(params=[2])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    fleet = Fleet("nccl", request.param)
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


@pytest.mark.parametrize("fleet", [4], indirect=True)
def test_what_three_gpus_need_reaches_each_once_and_is_passed_on(fleet: Fleet) -> None:
    for rows, max_message_bytes in ((10_007, MIB), (400_003, 64 * MIB)):
        fleet.open(20)
        answers = fleet.shuffle("copies", rows, max_message_bytes)
        plan = make_case("copies", rows).plan(max_message_bytes)
        assert [answer["right"] for answer in answers] == [[True] * 3] * 4
        assert sum(lane.messages.reads.nbytes for lane in plan.sends(0)) == plan.nbytes // 3
        seconds = max(answer["seconds"] for answer in answers)
        print(f"{plan.nbytes / 3e6:.0f} MB to 3 in {plan.num_rounds} rounds, {seconds * 1e3:.1f} ms")  # noqa: T201
