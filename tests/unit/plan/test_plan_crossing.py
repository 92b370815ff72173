"""What crosses between hosts: every byte arrives where it belongs, and what a host shares crosses once."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.shuffle_cases import bundles, reads_of
from tests.unit.plan.plan_strategies import PAD
from tests.unit.plan.reshard_strategies import Sides, packs, run, sides, unpacks
from weightsync.plan.cross_host import host_bundles
from weightsync.plan.cross_host.cross_host_parts import CrossHostParts, Needs
from weightsync.plan.cross_host.host_bundles import HostBundles
from weightsync.plan.cross_host.shuffle import Lane, ShufflePlan, in_order
from weightsync.plan.direct import alike
from weightsync.plan.direct.alike import AlikeReads, AlikeReshard
from weightsync.plan.direct.direct import Reads

LEAST, MIB = 256, 1 << 20


@dataclass
class CrossHostExchange:
    """An exchange, the plan of all its messages, and the part that each member plans.

    `given` are the needs as the exchange gets them: in kinds of tensors and of all trainers, or as they are.
    `near` has the trainers on each host.

    The needs of engine rank n are those of rank ``first + n``. With a second engine, they are those of rank
    ``first + len(made.ranks) + n``, too.
    """

    made: Sides
    needs: dict[int, Reads]
    hosts: dict[int, str]
    plan: ShufflePlan
    first: int
    parts: dict[int, ShufflePlan]
    given: dict[int, Needs]
    near: dict[str, list[int]]

    def number(self, rank: int) -> int:
        """Return the number of a receiving rank in its engine."""
        return (rank - self.first) % len(self.made.ranks)


def alike_reshard(made: Sides) -> AlikeReshard | None:
    """Pair both sides in kinds of tensors, however many those have."""
    source, engine = made.trainers_layout(), made.engine()
    with mock.patch.object(alike, "LEAST_ALIKE", 0):
        return AlikeReshard.of(source, "e0", engine, frozenset(engine.names))


@st.composite
def crossings(draw: st.DrawFn) -> CrossHostExchange:
    """Trainers are ranks 0 on; some are on the one to four hosts where bytes are needed."""
    made = draw(sides())
    first, size = len(made.trainers), len(made.ranks)
    reshard = made.reshard()
    kinds = alike_reshard(made) if draw(st.booleans()) else None
    homes = [draw(st.sampled_from(["", "a", "b", "c", "d"])) for _ in range(first)]
    near = {host: [trainer for trainer in range(first) if homes[trainer] == host] for host in "abcd"}
    hosts = {first + number: draw(st.sampled_from("ab")) for number in range(size)}
    if draw(st.booleans()):  # an engine of the same cut
        same, other = draw(st.booleans()), {"a": "c", "b": "d"}
        hosts |= {
            rank + size: other[host] if same else draw(st.sampled_from("abc")) for rank, host in hosts.items()
        }
    # One object where reads are the same: of replicas, where all trainers are as far.
    whole: dict[tuple[int, str], AlikeReads] = {}
    cut: dict[tuple[int, str], Reads] = {}
    needs, given = {}, {}
    for rank, host in hosts.items():
        number, home = (rank - first) % size, host if near[host] else ""
        distance = [1 if trainer in near[host] else 2 for trainer in range(first)]
        if kinds:
            of_all = number, home if kinds.has_replicas else ""
            if of_all not in whole:
                whole[of_all] = kinds.reads(number, distance)
        if (number, home) not in cut:
            reads = whole[of_all].whole() if kinds else reshard.reads(number, distance, start=0)
            cut[number, home] = reads.take(np.flatnonzero(~np.isin(reads.trainer, near[host])))
        if len(cut[number, home]):
            needs[rank] = cut[number, home]
            given[rank] = whole[of_all] if kinds else needs[rank]
    hosts = {rank: hosts[rank] for rank in needs}
    limit = draw(st.sampled_from([400 * LEAST, 1 << 18]))
    least = draw(st.sampled_from([1, 64, 1 << 20]))
    at_once = draw(st.sampled_from([1, 5, 1 << 20]))
    with mock.patch.multiple(host_bundles, LEAST_SHARE_NBYTES=least, _AT_ONCE=at_once):
        plan = ShufflePlan.from_bundles(bundles(needs, hosts), first, max_message_bytes=limit)
        parts = CrossHostParts(range(first + 2 * len(made.ranks)), range(first), given, hosts, near, limit)
        made_of_parts = plans(parts, {*range(first), *needs})
    # Shares of kinds are of whole buffers, so that others than of reads may be equal. Hosts with equal needs
    # of other hosts have messages as large as fit on each.
    if kinds and (least < MIB or any(homes)):
        lanes = in_order(lane for rank, part in made_of_parts.items() for lane in part.sends(rank))
        plan = replace(plan, lanes=lanes)
    return CrossHostExchange(made, needs, hosts, plan, first, made_of_parts, given, near)


def plans(parts: CrossHostParts, ranks: set[int]) -> dict[int, ShufflePlan]:
    """Return what each of `ranks` plans from what it is sent."""
    found = {}
    for rank in ranks:
        place = parts.terms.place(rank)
        received = parts.received(place[0].kind, place[1]) if place else None
        terms, sent, received = pickle.loads(pickle.dumps((parts.terms, parts.sent(rank), received)))
        found[rank] = terms.plan(rank, sent, received)
    return found


@given(crossings())
def test_every_byte_from_afar_arrives_once_where_it_belongs(case: CrossHostExchange) -> None:
    made, parts = case.made, case.parts
    packed = {}
    for rank, part in parts.items():
        src = {n: at for (t, n), at in made.addresses(0)[0].items() if t == rank}
        for lane in part.sends(rank):
            for number in range(0 if lane.hop else lane.messages.num_rounds):
                wire = np.zeros(lane.messages.nbytes[number], np.uint8)
                run(packs(lane.messages, number, src), made.source_line(), wire, np.zeros_like(wire))
                packed[lane.receiver, lane.bundle, number] = wire
    for rank, part in parts.items():
        for lane in part.sends(rank):
            for number in range(lane.messages.num_rounds if lane.hop else 0):
                assert (rank, lane.bundle, number) in packed, "it is passed on by who received it"
    for rank, reads in case.needs.items():
        sources, own = made.addresses(case.number(rank))
        blank = np.full_like(made.expected(case.number(rank)), PAD)
        expected, wanted = blank.copy(), np.zeros(len(blank), np.uint8)
        run(reads.copies(sources, own), made.source_line(), expected, wanted)
        target, written = blank.copy(), np.zeros(len(blank), np.uint8)
        for lane in parts[rank].receives(rank):
            for number in range(lane.messages.num_rounds):
                giver = lane.sender if lane.hop else rank
                wire = packed[giver, lane.bundle, number]
                assert len(wire) == lane.messages.nbytes[number]
                run(unpacks(lane.messages, number, own), wire, target, written)
        assert (written == wanted).all()
        assert (target == expected).all()


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


@given(crossings())
def test_a_rank_needs_no_more_of_the_plan_than_its_own_part(case: CrossHostExchange) -> None:
    for rank in {*case.plan.receivers, *range(case.first)}:
        part = case.plan.of(rank)
        assert part.sends(rank) == case.plan.sends(rank)
        assert part.receives(rank) == case.plan.receives(rank)
        assert len(part.lanes) == len(part.sends(rank)) + len(part.receives(rank))


@given(crossings())
def test_each_rank_plans_its_own_part_of_the_same_messages(case: CrossHostExchange) -> None:
    """Links carry the same bytes in the same rounds as in the plan of all messages."""
    for rank, part in case.parts.items():
        for side in ("sends", "receives"):
            wanted = Counter(map(on_link, getattr(case.plan, side)(rank)))
            assert Counter(map(on_link, getattr(part, side)(rank))) == wanted
        assert len(part.lanes) == len(part.sends(rank)) + len(part.receives(rank))
    digests = {rank: part.digests(rank) for rank, part in case.parts.items()}
    sent = {(rank, to): digest for rank, (its, _) in digests.items() for to, digest in its.items()}
    received = {(of, rank): digest for rank, (_, its) in digests.items() for of, digest in its.items()}
    assert sent == received
    for rank in case.needs:
        other = replace(case.parts[rank], max_message_bytes=1 << 19)
        assert set(other.digests(rank)[1].values()).isdisjoint(sent.values())


def on_link(lane: Lane) -> tuple[object, ...]:
    reads = lane.messages.reads
    rows = [column.tolist() for column in (reads.trainer, reads.src_buffer, reads.src, lane.messages.wire)]
    sizes = tuple(lane.messages.nbytes.tolist())
    return lane.sender, lane.receiver, lane.hop, sizes, *map(tuple, rows)


@given(crossings())
def test_a_hosts_bytes_are_counted_by_who_brings_them(case: CrossHostExchange) -> None:
    trainers, limit = range(case.first), case.plan.max_message_bytes
    parts = CrossHostParts(
        range(case.first + 2 * len(case.made.ranks)), trainers, case.given, case.hosts, case.near, limit
    )
    for rank, part in plans(parts, {*case.needs}).items():
        packed, passed_on = Counter(), Counter()
        for lane in part.receives(rank):
            (passed_on if lane.hop else packed)[lane.sender] += lane.messages.reads.nbytes
        assert parts.arrivals(rank) == (packed, passed_on)


def test_hosts_of_equal_needs_are_planned_once_and_what_a_member_gets_does_not_grow_with_them() -> None:
    needs = [reads_of([MIB] * 16), reads_of([MIB] * 8)]
    for number in (1, 20):
        ranks = {1 + place + 2 * host: needs[place] for host in range(number) for place in (0, 1)}
        hosts = {rank: str((rank - 1) // 2) for rank in ranks}
        with mock.patch.object(HostBundles, "of", side_effect=HostBundles.of) as divided:
            parts = CrossHostParts(range(1 + 2 * number), [0], ranks, hosts, {}, 8 * MIB)
        assert divided.call_count == 1
        assert [*parts.sent(0)] == [0]
        assert {len(host.ranks) for host in parts.terms.hosts} == {2}
        assert len(parts.terms.hosts) == number
        assert sum(len(plan.lanes) for plan in plans(parts, {1}).values()) == 4


def test_copies_of_an_engine_on_one_host_get_a_part_each_and_pass_it_on() -> None:
    reads = reads_of([MIB] * 64)

    def lanes(hosts: str) -> dict[tuple[int, int], int]:
        needs = {1 + number: reads for number in range(len(hosts))}
        dealt = bundles(needs, dict(zip(needs, hosts, strict=True)))
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
        dealt = bundles({7: moved, 8: moved}, {7: "a", 8: "a"})
        plan = ShufflePlan.from_bundles(dealt, 2, max_message_bytes=MIB)
        assert [lane.messages.num_rounds for lane in plan.lanes] == [1, 1]
        firsts.add(plan.lanes[0].receiver)
    assert firsts == {7, 8}
