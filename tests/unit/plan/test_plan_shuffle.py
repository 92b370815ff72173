"""Shuffle plans carried out on plain bytes equal gather-then-slice, within their bounds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shuffle_cases import make_case
from tests.unit.plan.plan_strategies import PAD
from tests.unit.plan.reshard_strategies import Sides, packs, run, sides, unpacks
from weightsync.errors import ConfigError, PlanError
from weightsync.plan import Layout
from weightsync.plan.cross_host.shuffle import ShufflePlan, capacities

LEAST = 256


@st.composite
def shuffles(draw: st.DrawFn) -> tuple[Sides, ShufflePlan]:
    """Any two sides; target ranks are the source's, others, or some of each."""
    made = draw(sides())
    num_ranks = len(made.ranks)
    every = st.permutations(range(len(made.trainers) + num_ranks))
    receivers = draw(st.one_of(st.none(), every.map(lambda ranks: ranks[:num_ranks])))
    limit = draw(st.sampled_from([16 * LEAST, 20 * LEAST + 77, 1 << 16]))
    plan = ShufflePlan.from_layouts(
        made.source(), made.engine(), max_message_bytes=limit, receivers=receivers
    )
    return made, plan


@given(shuffles())
def test_every_byte_arrives_once_where_it_belongs(case: tuple[Sides, ShufflePlan]) -> None:
    made, plan = case
    for number, receiver in enumerate(plan.receivers):
        sources, own = made.addresses(number)
        expected, line = made.expected(number), made.source_line()
        target, written = np.full_like(expected, PAD), np.zeros(len(expected), np.uint8)
        for rank, reads in plan.local:
            if rank == receiver:
                run(reads.copies(sources, own), line, target, written)
        for lane in plan.receives(receiver):
            src = {name: at for (rank, name), at in sources.items() if rank == lane.sender}
            for message in range(lane.messages.num_rounds):
                wire = np.zeros(lane.messages.nbytes[message], np.uint8)
                run(packs(lane.messages, message, src), line, wire, np.zeros_like(wire))
                run(unpacks(lane.messages, message, own), wire, target, written)
        assert (written == made.live_bytes(number)).all()
        assert (target == expected).all()


@given(shuffles())
def test_no_round_exceeds_the_bound_on_either_side(case: tuple[Sides, ShufflePlan]) -> None:
    _, plan = case
    sent, received = defaultdict(int), defaultdict(int)
    for lane in plan.lanes:
        assert lane.sender != lane.receiver
        assert lane.messages.round.tolist() == list(range(lane.messages.num_rounds))
        assert not lane.messages.offset.any()
        for round, nbytes in enumerate(lane.messages.nbytes.tolist()):
            sent[lane.sender, round] += -(-nbytes // LEAST) * LEAST
            received[lane.receiver, round] += -(-nbytes // LEAST) * LEAST
    assert max([0, *sent.values(), *received.values()]) <= plan.max_message_bytes
    assert all(rank in plan.receivers and rank < plan.num_senders for rank, _ in plan.local)


def test_who_has_it_sends_nothing() -> None:
    case = make_case("both")
    plan, apart = case.plan(64 << 10), replace(case, receivers=[2, 3]).plan(64 << 10)
    assert [rank for rank, _ in plan.local] == [0, 1]
    assert apart.local == ()
    assert plan.nbytes + sum(reads.nbytes for _, reads in plan.local) == apart.nbytes
    assert (plan.num_ranks, apart.num_ranks) == (2, 4)


def test_messages_are_few_and_full() -> None:
    """Of two senders to three receivers, each round carries nearly what it may."""
    plan = make_case("apart").plan(64 << 10)
    most = max(sum(lane.messages.reads.nbytes for lane in plan.sends(rank)) for rank in (0, 1))
    assert plan.num_rounds <= 1.3 * most / plan.max_message_bytes + 1


def test_the_digest_is_of_all_that_ranks_agree_on() -> None:
    case = make_case("apart")
    digests = {
        case.plan(64 << 10).digest(),
        case.plan(65 << 10).digest(),
        replace(case, receivers=[3, 2, 4]).plan(64 << 10).digest(),
        make_case("apart", 1030).plan(64 << 10).digest(),
    }
    assert len(digests) == 4
    assert make_case("apart").plan(64 << 10).digest() == case.plan(64 << 10).digest()


@pytest.mark.parametrize("receivers", [[2, 3], [2, 2, 3], [-1, 2, 3]])
def test_receivers_are_one_rank_each(receivers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"receivers: .* for each of the 3 target ranks"):
        replace(make_case("apart"), receivers=receivers).plan(64 << 10)


def test_a_bound_without_room_for_all_peers_is_refused() -> None:
    make_case("apart").plan(3 * LEAST)
    with pytest.raises(ConfigError, match="max_message_bytes: 767 is not valid; give at least 768"):
        make_case("apart").plan(767)


def test_a_target_with_a_hole_is_refused() -> None:
    case = make_case("apart")
    case.ranks[1].segments.pop()
    with pytest.raises(PlanError, match="bias"):
        case.plan(64 << 10)


def test_a_target_of_nobody_is_refused() -> None:
    case = make_case("apart")
    source = Layout.from_ranks([rank.layout(case.tensors) for rank in case.senders])
    with pytest.raises(PlanError, match="target: no rank receives"):
        ShufflePlan.from_layouts(source, [], max_message_bytes=1 << 20)


@pytest.mark.parametrize("gib", [1, 40, 73, 500, 3000])
def test_bundles_of_any_size_share_the_bound(gib: int) -> None:
    nbytes = np.array([gib << 30, 2 * gib << 30, gib << 20])
    found = capacities(nbytes, np.arange(3), np.zeros(3, np.int64), np.ones(3, np.int64), 256 << 20)
    assert 0.99 * (256 << 20) < found.sum() <= 256 << 20
    assert found[1] == pytest.approx(2 * found[0], rel=0.01)
    assert 0 < found[2] < found[0] // 100
