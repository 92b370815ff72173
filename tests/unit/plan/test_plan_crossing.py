"""What crosses between hosts: every byte arrives where it belongs, and what a host shares crosses once."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import PAD
from tests.unit.plan.reshard_strategies import Sides, run, sides
from weightsync.plan.cross_host import CrossHostNeeds, bundles
from weightsync.plan.direct import Reads
from weightsync.plan.shuffle import ShufflePlan

LEAST, MIB = 256, 1 << 20
few = settings(max_examples=40)


@dataclass
class CrossHostExchange:
    made: Sides
    needs: dict[int, Reads]
    hosts: dict[int, str]
    plan: ShufflePlan
    first: int


@st.composite
def crossings(draw: st.DrawFn) -> CrossHostExchange:
    """Trainers are ranks 0 on; some are near, and the other's bytes are needed on one or two hosts."""
    made = draw(sides())
    first = len(made.trainers)
    far = [trainer for trainer in range(first) if draw(st.integers(0, 3))]
    reshard, needs = made.reshard(), {}
    for number in range(len(made.ranks)):
        reads = reshard.reads(number, [1] * first, start=0)
        reads = reads.take(np.flatnonzero(np.isin(reads.trainer, far)))
        if len(reads):
            needs[first + number] = reads
    hosts = {rank: draw(st.sampled_from("ab")) for rank in needs}
    limit = draw(st.sampled_from([200 * LEAST, 1 << 18]))
    with mock.patch("weightsync.plan.cross_host.LEAST_SHARE_NBYTES", draw(st.sampled_from([1, 64, 1 << 20]))):
        made_bundles = bundles(needs, hosts, {trainer: trainer for trainer in far})
    plan = ShufflePlan.from_bundles(made_bundles, first, max_message_bytes=limit)
    return CrossHostExchange(made, needs, hosts, plan, first)


@few
@given(crossings())
def test_every_byte_from_afar_arrives_once_where_it_belongs(case: CrossHostExchange) -> None:
    made, plan = case.made, case.plan
    packed = {}
    for lane in plan.lanes:
        src = {n: at for (t, n), at in made.addresses(0)[0].items() if t == lane.sender}
        for number in range(lane.messages.num_rounds):
            if lane.hop:
                assert (lane.sender, lane.bundle, number) in packed, "it is passed on by who received it"
                continue
            wire = np.zeros(lane.messages.nbytes[number], np.uint8)
            run(lane.messages.pack(number, src, 0), made.source_line(), wire, np.zeros_like(wire))
            packed[lane.receiver, lane.bundle, number] = wire
    for rank, reads in case.needs.items():
        sources, own = made.addresses(rank - case.first)
        blank = np.full_like(made.expected(rank - case.first), PAD)
        expected, wanted = blank.copy(), np.zeros(len(blank), np.uint8)
        run(reads.copies(sources, own), made.source_line(), expected, wanted)
        target, written = blank.copy(), np.zeros(len(blank), np.uint8)
        for lane in plan.receives(rank):
            for number in range(lane.messages.num_rounds):
                giver = lane.sender if lane.hop else rank
                wire = packed[giver, lane.bundle, number]
                assert len(wire) == lane.messages.nbytes[number]
                run(lane.messages.unpack(number, 0, own), wire, target, written)
        assert (written == wanted).all()
        assert (target == expected).all()


@few
@given(crossings())
def test_what_a_host_shares_crosses_once(case: CrossHostExchange) -> None:
    wanted: dict[str, Counter] = defaultdict(Counter)
    for rank, reads in case.needs.items():
        columns = (reads.trainer, reads.src_buffer, reads.src, reads.rows, reads.row_nbytes, reads.src_pitch)
        rows = zip(*(column.tolist() for column in (*columns, reads.dst_pitch)), strict=True)
        wanted[case.hosts[rank]] |= Counter(rows)  # a rank may want the same twice
    sent = Counter()
    for lane in case.plan.lanes:
        if lane.hop:
            assert case.hosts[lane.sender] == case.hosts[lane.receiver]
        else:
            sent[case.hosts[lane.receiver]] += lane.messages.reads.nbytes
    assert sent == {h: sum(row[3] * row[4] * n for row, n in rows.items()) for h, rows in wanted.items()}


@few
@given(crossings())
def test_no_round_exceeds_the_bound_on_either_side(case: CrossHostExchange) -> None:
    packed, received = defaultdict(int), defaultdict(int)
    for lane in case.plan.lanes:
        for number, nbytes in enumerate(lane.messages.nbytes.tolist()):
            size = -(-nbytes // LEAST) * LEAST
            if not lane.hop:
                packed[lane.sender, number] += size
            received[lane.receiver, lane.hop + number] += size
    assert max([0, *packed.values(), *received.values()]) <= case.plan.max_message_bytes


@few
@given(crossings())
def test_a_rank_needs_no_more_of_the_plan_than_its_own_part(case: CrossHostExchange) -> None:
    for rank in {*case.plan.receivers, *range(case.first)}:
        part = case.plan.of(rank)
        assert part.sends(rank) == case.plan.sends(rank)
        assert part.receives(rank) == case.plan.receives(rank)
        assert len(part.lanes) == len(part.sends(rank)) + len(part.receives(rank))


@few
@given(crossings())
def test_each_rank_plans_its_own_part_of_the_same_messages(case: CrossHostExchange) -> None:
    trainers = tuple(range(case.first))
    members = (*trainers, *sorted(case.needs))
    shared = CrossHostNeeds(members, trainers, case.needs, case.hosts, 1 << 18)
    whole = ShufflePlan.from_bundles(shared.bundles(), case.first, max_message_bytes=1 << 18)
    ranks = {*trainers, *case.needs}
    parts = {rank: shared.plan(rank) for rank in ranks}
    for rank, part in parts.items():
        assert part.digest() == whole.of(rank).digest()
    digests = {rank: part.digests(rank) for rank, part in parts.items()}
    sent = {(rank, to): digest for rank, (its, _) in digests.items() for to, digest in its.items()}
    received = {(of, rank): digest for rank, (_, its) in digests.items() for of, digest in its.items()}
    assert sent == received
    other = replace(shared, max_message_bytes=1 << 19)
    for rank in case.needs:
        assert set(other.plan(rank).digests(rank)[1].values()).isdisjoint(sent.values())


def test_copies_of_an_engine_on_one_host_get_a_part_each_and_pass_it_on() -> None:
    reads = reads_of([MIB] * 64)

    def lanes(hosts: str) -> dict[tuple[int, int], int]:
        needs = {1 + number: reads for number in range(len(hosts))}
        dealt = bundles(needs, dict(zip(needs, hosts, strict=True)), {0: 0})
        plan = ShufflePlan.from_bundles(dealt, 1, max_message_bytes=8 * MIB)
        return {(lane.sender, lane.receiver): lane.messages.reads.nbytes for lane in plan.lanes}

    half = {(0, 1): 32 * MIB, (0, 2): 32 * MIB, (1, 2): 32 * MIB, (2, 1): 32 * MIB}
    assert lanes("ab") == {(0, 1): 64 * MIB, (0, 2): 64 * MIB}
    assert lanes("aa") == half
    assert lanes("aab") == {**half, (0, 3): 64 * MIB}


def test_what_is_little_comes_to_one_and_in_one_message_and_not_always_to_the_same() -> None:
    reads = reads_of([1 << 10] * 32)
    firsts = set()
    for trainer in range(2):
        moved = replace(reads, trainer=reads.trainer + trainer)
        dealt = bundles({7: moved, 8: moved}, {7: "a", 8: "a"}, {trainer: 0})
        plan = ShufflePlan.from_bundles(dealt, 1, max_message_bytes=MIB)
        assert [lane.messages.num_rounds for lane in plan.lanes] == [1, 1]
        firsts.add(plan.lanes[0].receiver)
    assert firsts == {7, 8}


def reads_of(sizes: list[int]) -> Reads:
    """One behind the other, out of one buffer and into one."""
    start = np.cumsum([0, *sizes[:-1]])
    table = np.column_stack([start, start, np.ones_like(start), sizes, sizes, sizes])
    zeros = np.zeros_like(start)
    return Reads.from_table(zeros, ("w",), zeros, ("w",), zeros, table)
