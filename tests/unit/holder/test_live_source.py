"""Live memory is read as it is, and by nobody once it may change."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.patience import patient
from weightsync.errors import ReadError, StateError
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.live_source import LiveSnapshot, LiveSource
from weightsync.holder.snapshots import HEADER_NBYTES, encode_header
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import SnapshotHeader
from weightsync.readers import Read, Reader, open_reader
from weightsync.readers.zeromq_server import CHUNK_NBYTES

HEADER = SnapshotHeader(3, "layout", 1)
SIZES = {"c": 5, "a": CHUNK_NBYTES + 77, "b": 1, "d": 2 * CHUNK_NBYTES + 1}


def memory() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for name, nbytes in SIZES.items()}


def whole(live: dict[str, torch.Tensor]) -> bytes:
    return encode_header(HEADER) + b"".join(live[name].numpy().tobytes() for name in sorted(live))


@pytest.fixture
def source() -> Iterator[LiveSource]:
    """A source whose memory an update of attempt 1 has filled."""
    found = LiveSource("holder 1", "127.0.0.1", None)
    with found.writing(1):
        pass
    yield found
    found.end()


@contextlib.contextmanager
def reading(offer: Offer, nbytes: int) -> Iterator[tuple[Reader, SharedBuffer]]:
    target = SharedBuffer.create(nbytes)
    reader = open_reader([target], {"source": offer})
    yield reader, target
    reader.close()
    target.close()


def refused(offer: Offer) -> None:
    with reading(offer, 8) as (reader, _), pytest.raises(ReadError, match="source"):
        reader.read([Read("source", 0, 0, 0, 8)], patient(10))


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [
        (0, HEADER_NBYTES),
        (HEADER_NBYTES, 1),
        (HEADER_NBYTES - 3, 11),
        (HEADER_NBYTES + SIZES["a"] - 1, 9),
        (HEADER_NBYTES + 13, CHUNK_NBYTES + 1),
        (0, HEADER_NBYTES + sum(SIZES.values())),
        (HEADER_NBYTES + sum(SIZES.values()), 0),
    ],
)
def test_reads_equal_the_memory(source: LiveSource, start: int, nbytes: int) -> None:
    live = memory()
    offer = source.offer(HEADER, FlatSnapshot(live), 2)
    assert offer.memory.nbytes == len(whole(live))
    with reading(offer, nbytes) as (reader, target):
        assert reader.ways == {"source": "zeromq"}, "it is not mapped, though it is of this process"
        reader.read([Read("source", start, 0, 0, nbytes)], patient(20))
        assert target.tensor.numpy().tobytes() == whole(live)[start : start + nbytes]


def test_a_read_shows_no_header_if_the_memory_was_written_meanwhile() -> None:
    class Written(FlatSnapshot):
        def copy_to(self, to: torch.Tensor, first: int) -> None:
            super().copy_to(to, first)
            served.clear()

    served = LiveSnapshot(Written(memory()), HEADER)
    assert served.read(0, HEADER_NBYTES)[:1] == b"\0"
    assert served.read(0, HEADER_NBYTES + 9)[:HEADER_NBYTES] == bytes(HEADER_NBYTES)


def test_a_reader_in_mid_read_is_told_when_it_is_withdrawn(source: LiveSource) -> None:
    offer = source.offer(HEADER, FlatSnapshot(memory()), 2)
    nbytes = offer.memory.nbytes - HEADER_NBYTES
    begun = threading.Event()

    def read_on(reader: Reader) -> None:
        while True:
            reader.read([Read("source", HEADER_NBYTES, 0, 0, nbytes)], patient(20))
            begun.set()

    with reading(offer, nbytes) as (reader, _), ThreadPoolExecutor(1) as thread:
        running = thread.submit(read_on, reader)
        assert begun.wait(patient(20))
        source.withdraw(3)
        assert isinstance(running.exception(patient(20)), ReadError)


def test_a_wrong_secret_is_refused(source: LiveSource) -> None:
    offer = source.offer(HEADER, FlatSnapshot(memory()), 2)
    stranger = dataclasses.replace(offer, secret=secrets.token_hex(32))
    with reading(stranger, 8) as (reader, _), pytest.raises(ReadError, match="the secret is wrong"):
        reader.read([Read("source", 0, 0, 0, 8)], patient(10))


def test_an_error_of_the_device_is_told_and_the_server_goes_on(source: LiveSource) -> None:
    class Failing(FlatSnapshot):
        def copy_to(self, to: torch.Tensor, first: int) -> None:
            if first:
                raise RuntimeError("an illegal memory access")
            super().copy_to(to, first)

    offer = source.offer(HEADER, Failing(memory()), 2)
    with reading(offer, 8) as (reader, _), pytest.raises(ReadError, match="RuntimeError: an illegal"):
        reader.read([Read("source", HEADER_NBYTES + 1, 0, 0, 8)], patient(10))
    with reading(offer, 8) as (reader, target):
        reader.read([Read("source", HEADER_NBYTES, 0, 0, 8)], patient(10))
        assert target.tensor.any()


def test_two_refills_share_a_server_and_another_version_has_one_of_its_own(source: LiveSource) -> None:
    flat = FlatSnapshot(memory())
    first = source.offer(HEADER, flat, 2)
    assert source.offer(HEADER, flat, 3) == first
    other = source.offer(SnapshotHeader(4, HEADER.layout, HEADER.part), flat, 4)
    assert other.endpoint != first.endpoint
    refused(first)
    with reading(other, 8) as (reader, _):
        reader.read([Read("source", 0, 0, 0, 8)], patient(10))


def test_nothing_is_offered_of_memory_that_is_not_known_to_be_whole(source: LiveSource) -> None:
    flat = FlatSnapshot(memory())
    fresh = LiveSource("holder 2", "127.0.0.1", None)
    with pytest.raises(StateError, match="holder 2 does not know"):
        fresh.offer(HEADER, flat, 1)
    with pytest.raises(StateError):
        source.offer(HEADER, None, 2)
    with pytest.raises(RuntimeError), source.writing(2):
        raise RuntimeError("the move broke")
    with pytest.raises(StateError):
        source.offer(HEADER, flat, 3)
    with source.writing(4):
        source.end()  # the engine rank was dropped
    with pytest.raises(StateError):
        source.offer(HEADER, flat, 5)
    with source.writing(6):
        pass
    source.offer(HEADER, flat, 7)


def test_an_offer_that_arrives_after_a_later_write_or_withdrawal_is_refused(source: LiveSource) -> None:
    flat = FlatSnapshot(memory())
    with source.writing(5):
        pass
    with pytest.raises(StateError):
        source.offer(HEADER, flat, 4)
    first = source.offer(HEADER, flat, 6)
    source.withdraw(7)
    refused(first)
    with pytest.raises(StateError):
        source.offer(HEADER, flat, 6)
    again = source.offer(HEADER, flat, 9)
    source.withdraw(8)  # of a refill that ended before the offer was asked for
    with reading(again, 8) as (reader, _):
        reader.read([Read("source", 0, 0, 0, 8)], patient(10))


def test_nothing_is_left_of_a_source_that_ended(source: LiveSource) -> None:
    for attempt in (2, 4, 6):
        before = threading.active_count()
        offer = source.offer(HEADER, FlatSnapshot(memory()), attempt)
        assert threading.active_count() > before
        source.withdraw(attempt + 1)
        source.withdraw(attempt + 1)
        assert threading.active_count() <= before  # threads of earlier tests may end
        refused(offer)
