"""The next version is staged beside the one that is kept, and takes its place in one step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.patience import patient
from weightsync.errors import ReadError, TransportError
from weightsync.holder import snapshots
from weightsync.holder.snapshots import SnapshotStore
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.messages import SnapshotHeader

NBYTES = 5000
EXPECTED = np.zeros(3, np.uint64)


class Filled:
    nbytes = NBYTES

    def __init__(self, value: int) -> None:
        self.value = value

    def save(self, to: torch.Tensor) -> None:
        to.fill_(self.value)


@pytest.fixture
def stores() -> Iterator[list[SnapshotStore]]:
    made = [SnapshotStore(f"holder {i}", "127.0.0.1", "zeromq", "") for i in range(2)]
    for each in made:
        each.reserve_spares({0: NBYTES})
    yield made
    for each in made:
        each.close()


def header(version: int) -> SnapshotHeader:
    return SnapshotHeader(version, "layout", 0)


def value(store: SnapshotStore, version: int) -> int | None:
    held = store.held(header(version))
    return None if held is None else int(held.bytes.unique().item())


def test_a_staged_part_leaves_the_kept_one_until_it_takes_its_place(stores: list[SnapshotStore]) -> None:
    store = stores[0]
    store.snapshot(header(1), EXPECTED, Filled(1))
    memory = {each.data_ptr() for each in store.memory(0)}
    for version in (2, 3, 4):
        store.snapshot(header(version), EXPECTED, Filled(version), store.begin_staging())
        assert [part.header for part in store.snapshots()] == [header(version - 1)]
        assert value(store, version - 1) == version - 1
        store.keep(version)
        assert [part.header for part in store.snapshots()] == [header(version)]
        assert value(store, version) == version
    assert {each.data_ptr() for each in store.memory(0)} == memory, "nothing was allocated"


def test_a_staged_part_is_copied_to_another_holder_and_kept_there(stores: list[SnapshotStore]) -> None:
    first, second = stores
    first.snapshot(header(1), EXPECTED, Filled(7), first.begin_staging())
    turn = first.begin_staging()
    first.snapshot(header(2), EXPECTED, Filled(9), turn)
    first.keep(2)
    (part,) = first.snapshots()
    second.replicate(part, 10.0, second.begin_staging())
    assert second.snapshots() == []
    assert value(second, 2) == 9
    second.keep(2)
    assert [each.header for each in second.snapshots()] == [header(2)]


def test_a_version_that_is_given_up_is_never_kept(stores: list[SnapshotStore]) -> None:
    store = stores[0]
    store.snapshot(header(1), EXPECTED, Filled(1))
    store.snapshot(header(2), EXPECTED, Filled(2), store.begin_staging())
    store.keep(3)
    assert [part.header for part in store.snapshots()] == [header(1)]
    assert value(store, 1) == 1


def test_an_earlier_turn_does_not_overwrite_what_a_later_one_staged(stores: list[SnapshotStore]) -> None:
    store = stores[0]
    late, now = store.begin_staging(), store.begin_staging()
    store.snapshot(header(2), EXPECTED, Filled(2), now)
    with pytest.raises(TransportError, match="holder 0 stages something newer"):
        store.snapshot(header(1), EXPECTED, Filled(1), late)
    assert value(store, 2) == 2


def test_a_source_that_was_replaced_is_no_copy(stores: list[SnapshotStore]) -> None:
    first, second = stores
    first.snapshot(header(1), EXPECTED, Filled(1))
    (part,) = first.snapshots()
    first.snapshot(header(2), EXPECTED, Filled(2))
    with pytest.raises(ReadError, match="holder 0"):
        second.replicate(part, 10.0, second.begin_staging())
    second.keep(1)
    assert second.snapshots() == []


def test_parts_that_are_no_longer_staged_here_are_freed(stores: list[SnapshotStore]) -> None:
    store = stores[0]
    store.snapshot(header(1), EXPECTED, Filled(1))
    store.reserve_spares({1: NBYTES})
    assert value(store, 1) == 1, "engines are healed from it until the next version"
    store.keep(2)
    assert store.memory(0) == []
    assert len(store.memory(1)) == 2


def test_both_versions_of_another_holders_part_are_mapped_once(stores: list[SnapshotStore]) -> None:
    first, second = stores
    offers = first.reserve_spares({0: NBYTES})
    second.reserve_spares({})
    second.mapped.map(offers)
    first.snapshot(header(1), EXPECTED, Filled(1))
    for version in (2, 3):
        first.snapshot(header(version), EXPECTED, Filled(version), first.begin_staging())
        found = second.held(header(version))
        assert found is not None
        assert (found.holder, found.way) == ("holder 0", "mapped")
        assert value(second, version) == version
        first.keep(version)
    second.mapped.map({0: offers[0][:1]})
    mapped = [second.held(header(version)) for version in (2, 3)]
    assert sum(held is not None for held in mapped) == 1


def test_a_part_is_freed_unless_it_has_another_version_or_versions_are_staged_there(
    stores: list[SnapshotStore],
) -> None:
    store = stores[0]
    store.snapshot(header(1), EXPECTED, Filled(1))
    store.release(header(1))
    assert value(store, 1) == 1
    store.reserve_spares({})
    store.release(header(2))
    assert value(store, 1) == 1
    store.release(header(1))
    assert store.snapshots() == []
    assert store.memory(0) == []
    store.release(header(1))


def test_what_was_not_received_to_its_end_is_not_served_and_can_be_freed(stores: list[SnapshotStore]) -> None:
    first, second = stores
    first.snapshot(header(1), EXPECTED, Filled(7))
    (part,) = first.snapshots()
    second.reserve_spares({})
    with pytest.raises(ReadError), second.receiving(part):
        raise ReadError("holder 0", "it is gone")
    assert second.snapshots() == []
    assert value(second, 1) is None
    second.release(header(1))
    assert second.memory(0) == []


class Slow:
    """Allocates memory once it may."""

    def __init__(self) -> None:
        self.begun, self.may, self.made = threading.Event(), threading.Event(), list[SharedBuffer]()

    def create(self, nbytes: int, *, in_parts: bool) -> SharedBuffer:
        self.begun.set()
        assert self.may.wait(patient(20))
        self.made.append(SharedBuffer.create(nbytes, in_parts=in_parts))
        return self.made[-1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr(snapshots, "SharedBuffer", slow)
    return slow


def test_whoever_takes_over_does_not_wait_for_memory_that_is_being_allocated(slow: Slow) -> None:
    store = SnapshotStore("holder 0", "127.0.0.1", "zeromq", "")
    with ThreadPoolExecutor() as threads:
        slow.may.set()
        store.snapshot(header(1), EXPECTED, Filled(1))
        slow.begun.clear()
        slow.may.clear()
        reserving = threads.submit(store.reserve, 1, NBYTES)
        assert slow.begun.wait(patient(10))
        assert [part.header for part in store.snapshots()] == [header(1)]
        assert not reserving.done()
        slow.may.set()
    store.close()


def test_memory_that_is_being_allocated_when_a_holder_closes_is_freed(slow: Slow) -> None:
    store = SnapshotStore("holder 0", "127.0.0.1", "zeromq", "")
    with ThreadPoolExecutor() as threads:
        reserving = threads.submit(store.reserve, 0, NBYTES)
        assert slow.begun.wait(patient(10))
        closing = threads.submit(store.close)
        slow.may.set()
        assert reserving.result(patient(10)).holder == "holder 0"
        closing.result(patient(10))
    assert [len(each.tensor) for each in slow.made] == [0]
    with pytest.raises(TransportError, match="holder 0 is closed"):
        store.reserve(0, NBYTES)
