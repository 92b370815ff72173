"""Messages on a stream, cut and put together."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import patient
from weightsync.errors import WireError
from weightsync.protocol.ports import listen
from weightsync.protocol.proof import proof_of
from weightsync.protocol.stream import Splitter, Stream, endpoint_of, framed

MESSAGES = st.lists(st.binary(max_size=64), max_size=8)


@given(MESSAGES, st.lists(st.integers(0, 600), max_size=12))
def test_messages_come_whole_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, messages))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = Splitter(64)
    came = [each for a, b in itertools.pairwise(edges) for each in splitter.feed(stream[a:b])]
    assert came == messages


def test_a_message_that_is_too_long_is_refused_by_its_length_alone() -> None:
    splitter = Splitter(4)
    assert list(splitter.feed(framed(b"1234"))) == [b"1234"]
    with pytest.raises(WireError, match="5 bytes, more than 4"):
        list(splitter.feed(framed(b"12345")[:4]))


def test_the_limit_counts_from_the_next_message_on() -> None:
    splitter, came = Splitter(2), list[bytes]()
    for message in splitter.feed(framed(b"12") + framed(b"123")):
        came.append(message)
        splitter.max_nbytes = 3
    assert came == [b"12", b"123"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_one_end_sends_the_other_receives(host: str) -> None:
    with closing(listen(host, None, "the test cannot listen")) as listening:
        listening.settimeout(patient(10))
        with closing(Stream(endpoint_of(listening), "secret", 1 << 24, patient(10))) as stream:
            end, _ = listening.accept()
            with end:
                large = bytes(range(256)) * (1 << 14)
                sending = threading.Thread(target=stream.send, args=(large,))
                sending.start()
                received, num_proof = bytearray(), len(framed(proof_of("secret")))
                while len(received) < num_proof + len(framed(large)):
                    received += end.recv(1 << 20)
                sending.join()
                assert received[num_proof:] == framed(large)
                assert b"secret" not in received
                end.sendall(framed(b"one") + framed(b"") + framed(large)[:100])
                assert stream.receive(patient(10)) == b"one"
                assert stream.receive(patient(10)) == b""
                began = time.monotonic()
                assert stream.receive(0.05) is None
                assert time.monotonic() - began >= 0.05
                threading.Thread(target=end.sendall, args=(framed(large)[100:],)).start()
                assert stream.receive(patient(10)) == large
                assert stream.receive(0) is None
            with pytest.raises(ConnectionResetError):
                stream.receive(patient(10))


def test_nobody_there_is_an_error_of_the_system() -> None:
    listening = listen("127.0.0.1", None, "the test cannot listen")
    endpoint = endpoint_of(listening)
    listening.close()
    with pytest.raises(ConnectionRefusedError):
        Stream(endpoint, "secret", 64, patient(10))


def test_a_driver_that_takes_nothing_does_not_hold_up_who_sends() -> None:
    with closing(listen("127.0.0.1", None, "the test cannot listen")) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream = Stream(endpoint_of(listening), "secret", 64, 0.2)
        with closing(stream), pytest.raises(TimeoutError):
            stream.send(bytes(64 << 20))
