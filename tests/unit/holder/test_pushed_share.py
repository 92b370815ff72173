"""The order in which a holder asks its trainer rank for buckets, and the buffers that it names."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.patience import patient
from weightsync.channel.push import PushEnd
from weightsync.errors import TransportError
from weightsync.holder.pushed_share import PushedShare
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.transports import Pending

NUM_BUCKETS = 7
NBYTES = 256


class Rank:
    """A trainer rank that answers at once: it writes a bucket's number into all of the buffer.

    `asked` has the buckets in the order of their asks. It fails for `broken`.
    """

    def __init__(self, plan: Plan, share: PushedShare) -> None:
        self.asked: list[int] = []
        self.broken = -1
        self._arrived = threading.Condition()
        self._ring = [SharedBuffer.create(NBYTES) for _ in range(share.ticket.num_buffers)]
        self._end = PushEnd(share.ticket, plan.digest(), tuple(buffer.handle for buffer in self._ring))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while ask := self._end.receive():
            self._ring[ask.buffer].tensor.fill_(ask.bucket)
            self._end.answer(ask.ticket, "no such page" if ask.bucket == self.broken else "")
            with self._arrived:
                self.asked.append(ask.bucket)
                self._arrived.notify()

    def was_asked(self, buckets: list[int]) -> bool:
        with self._arrived:
            return self._arrived.wait_for(lambda: self.asked == buckets, patient(10))

    def close(self) -> None:
        self._end.hang_up()
        self._thread.join()
        self._end.close()
        for buffer in self._ring:
            buffer.close()


@pytest.fixture(scope="module")
def plan() -> Plan:
    tensors = tuple(TensorMeta(f"t{i}", "uint8", (NBYTES,)) for i in range(NUM_BUCKETS))
    side = Layout.from_ranks([RankLayout(tensors, tuple(map(Segment.whole, tensors)))])
    members = Members(num_holders=2, trainers=(0,), engines=(("e", (1,)),))
    return make_plan(side, {"e": side}, members, bucket_bytes=NBYTES, max_staging_bytes=4 * NBYTES, slots=2)


@pytest.fixture
def share(plan: Plan) -> Iterator[PushedShare]:
    share = PushedShare(plan, 0, "")
    yield share
    share.close()


@pytest.fixture
def rank(plan: Plan, share: PushedShare) -> Iterator[Rank]:
    rank = Rank(plan, share)
    share.accept(patient(10))
    yield rank
    rank.close()


def move(share: PushedShare, buckets: range) -> list[int]:
    """Fill slots as an update does, one bucket ahead. Returns what is in each."""
    share.begin(buckets, patient(10))
    slots = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(2)]
    ahead: list[tuple[int, list[Pending]]] = []
    found: list[int] = []

    def take() -> None:
        bucket, pending = ahead.pop(0)
        for each in pending:
            each.wait()
        (value,) = set(slots[bucket % 2].tolist())
        found.append(value)

    for bucket in buckets:
        ahead.append((bucket, [*share.fill(bucket, slots[bucket % 2], patient(10))]))
        if len(ahead) == 2:
            take()
    while ahead:
        take()
    return found


def test_as_many_buckets_are_asked_for_as_the_ring_holds(share: PushedShare, rank: Rank) -> None:
    assert share.ticket.num_buffers == 4
    share.begin(range(NUM_BUCKETS), patient(10))
    assert rank.was_asked([0, 1, 2, 3])


def test_a_buffer_is_asked_for_again_once_it_was_copied(share: PushedShare, rank: Rank) -> None:
    for _ in range(3):
        rank.asked.clear()
        assert move(share, range(NUM_BUCKETS)) == list(range(NUM_BUCKETS))
        assert rank.was_asked(list(range(NUM_BUCKETS)))


def test_a_bucket_that_nobody_announced_is_asked_for(share: PushedShare, rank: Rank) -> None:
    slot = torch.empty(NBYTES, dtype=torch.uint8)
    for pending in share.fill(5, slot, patient(10)):
        pending.wait()
    assert set(slot.tolist()) == {5}
    assert rank.was_asked([5])


def test_an_update_after_one_that_failed_starts_anew(share: PushedShare, rank: Rank) -> None:
    rank.broken = 3
    with pytest.raises(TransportError, match="trainer 0 cannot push bucket 3: no such page"):
        move(share, range(NUM_BUCKETS))
    rank.broken = -1
    assert move(share, range(NUM_BUCKETS)) == list(range(NUM_BUCKETS))
    assert [part[2].tolist() for part in share.held()] == [[i] * NBYTES for i in range(NUM_BUCKETS)]
