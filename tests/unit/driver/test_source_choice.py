"""What an engine is filled from, for any copies and engines that serve."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from weightsync.driver.snapshots.source_choice import Candidates
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.protocol.messages import SnapshotHeader

HOSTS = "abcd"
MEMORY = BufferHandle.unmapped(8)


def offer(holder: str, protocol: str = "zeromq") -> Offer:
    return Offer(holder=holder, protocol=protocol, memory=MEMORY, endpoint="", base=0)  # type: ignore[arg-type]


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    """Draw what an engine of one or two ranks on one host could be filled from."""
    mixes, node = draw(st.booleans()), draw(st.sampled_from(HOSTS))
    nodes = [node] * draw(st.integers(1, 2))
    hosts = {f"holder {i}": host for i, host in enumerate(HOSTS)}
    having = st.lists(st.sampled_from(sorted(hosts)), unique=True, max_size=3)
    num_parts = len(nodes) if mixes else draw(st.integers(1, 2))
    copies = {part: [offer(holder) for holder in draw(having)] for part in range(num_parts)}
    if draw(st.booleans()) and not any(copies.values()):
        copies = {}  # as before the first commit
    live = {host: f"engine {host}" for host in draw(st.lists(st.sampled_from(HOSTS), unique=True))}
    return Candidates(copies, hosts, live, nodes, mixes)


def filled(all_of: Candidates) -> tuple[bool, set[str]]:
    """Return whether there is a snapshot, and the hosts of what it reads first."""
    choice = all_of.choose()
    is_flat = all_of.mixes or bool(choice.first.live)
    num_parts = len(all_of.nodes) if is_flat else len(all_of.copies)
    live = {
        name: {part: offer(f"of {name}") for part in range(num_parts)}
        for name in (*choice.first.live, *choice.reserve.live)
    }
    snapshot = choice.snapshot(SnapshotHeader(1, "x", 0), num_parts, is_flat, live)
    assert (snapshot is not None) == choice.suffices or bool(choice.first.live)
    if snapshot is None:
        return False, set()
    for part, offers in snapshot.parts.items():
        holders = [each.holder for each in offers]
        assert holders
        assert not {*holders} & {each.holder for each in snapshot.reserve.get(part, ())}
    places = all_of.hosts | {f"of engine {host}": host for host in HOSTS}
    return True, {places[each.holder] for offers in snapshot.parts.values() for each in offers}


@given(candidates())
def test_whoever_has_each_part_is_enough(all_of: Candidates) -> None:
    exists, _ = filled(all_of)
    whole = bool(all_of.copies) and all(all_of.copies.values())
    assert exists == (bool(all_of.live) or whole)


@given(candidates())
def test_nothing_crosses_if_the_own_host_has_all(all_of: Candidates) -> None:
    node = all_of.nodes[0]
    places = [{all_of.hosts[each.holder] for each in its} for its in all_of.copies.values()]
    copied = bool(places) and all(node in hosts for hosts in places)
    is_near = copied or node in all_of.live
    assert all_of.choose().is_near == is_near
    if is_near:
        assert filled(all_of)[1] == {node}


@given(candidates())
def test_else_at_least_as_many_hosts_are_read_as_have_copies(all_of: Candidates) -> None:
    exists, read = filled(all_of)
    if exists and not all_of.choose().is_near and all(all_of.copies.values()) and len(all_of.nodes) == 1:
        copied = {all_of.hosts[each.holder] for its in all_of.copies.values() for each in its}
        assert len(read) >= len(copied)


@given(candidates(), st.sampled_from(HOSTS), st.integers(0, 3))
def test_a_host_copies_what_it_lacks_if_several_ranks_would_read_it(
    all_of: Candidates, host: str, others: int
) -> None:
    num_ranks, first = all_of.nodes.count(host) + others, all_of.choose().first
    shared = all_of.shared(host, others)
    if all_of.mixes or first.live or num_ranks < 2 or not all(all_of.copies.values()):
        assert shared == {}
        return
    for part, offers in all_of.copies.items():
        has = host in {all_of.hosts[each.holder] for each in offers}
        assert shared.get(part) == (None if has else offers)


@given(candidates(), st.integers(0, 3))
def test_what_is_copied_makes_all_near_and_is_not_copied_again(all_of: Candidates, others: int) -> None:
    host = all_of.nodes[0]
    if not (shared := all_of.shared(host, others)):
        return
    near = offer("the host's")
    copies = {part: [*its, *([near] if part in shared else [])] for part, its in all_of.copies.items()}
    now = replace(all_of, copies=copies, hosts={**all_of.hosts, near.holder: host})
    assert now.shared(host, others) == {}
    assert now.choose().is_near
    assert filled(now)[1] == {host}


def test_copies_that_are_read_by_rdma_leave_engines_alone() -> None:
    copies = {0: [offer("holder 0", "rdma")]}
    choice = Candidates(copies, {"holder 0": "a"}, {"b": "engine b", "c": "engine c"}, ["d"], True).choose()
    assert not choice.first.live
    assert choice.first.copies == copies
