"""Connections that `weightsync doctor --cluster` measures, on this host's own network."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.patience import patient
from weightsync.errors import ConfigError, TransportError
from weightsync.recipes.doctor import link_probe
from weightsync.recipes.doctor.host_probe import num_free
from weightsync.recipes.doctor.link_probe import LinkServer, measure

HOST, SECRET, WAIT_S = "127.0.0.1", b"0123456789abcdef", patient(10)


@pytest.fixture
def server() -> Iterator[LinkServer]:
    with contextlib.closing(LinkServer(HOST, None, SECRET, WAIT_S)) as made:
        yield made


def test_a_connection_is_measured_again_and_again(server: LinkServer) -> None:
    for _ in range(2):
        link = measure(server.endpoint, SECRET, WAIT_S)
        assert 0 < link.rtt_ms < WAIT_S * 1e3
        assert 0 < link.nbytes < link_probe.MAX_NBYTES + (1 << 20)
        assert link.gb_per_s > 0.01


def test_few_bytes_end_a_measurement(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "MAX_NBYTES", 1 << 20)
    monkeypatch.setattr(link_probe, "SECONDS", WAIT_S)
    assert 1 << 20 <= measure(server.endpoint, SECRET, WAIT_S).nbytes < 2 << 20


def test_a_stranger_is_not_answered(server: LinkServer) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        measure(server.endpoint, b"x" * 16, WAIT_S)
    assert measure(server.endpoint, SECRET, WAIT_S).nbytes


def test_a_server_that_is_gone_refuses(server: LinkServer) -> None:
    server.close()
    with pytest.raises(ConnectionRefusedError):
        measure(server.endpoint, SECRET, WAIT_S)


def test_a_server_that_does_not_answer_costs_the_timeout() -> None:
    with socket.create_server((HOST, 0)) as deaf, pytest.raises(TimeoutError):
        measure(f"{HOST}:{deaf.getsockname()[1]}", SECRET, 0.2)


def test_a_server_that_reads_nothing_costs_the_timeout() -> None:
    with socket.create_server((HOST, 0)) as full:

        def echo() -> None:
            connection, _ = full.accept()
            with connection:
                connection.recv(16, socket.MSG_WAITALL)
                for _ in range(link_probe.NUM_PINGS):
                    connection.sendall(connection.recv(1))
                ended.wait(WAIT_S)

        ended = threading.Event()
        thread = threading.Thread(target=echo)
        thread.start()
        with pytest.raises(TimeoutError):
            measure(f"{HOST}:{full.getsockname()[1]}", SECRET, 1.0)
        ended.set()
        thread.join()


def test_ports_in_use_are_not_free() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert num_free(HOST, (port, port)) == 0
        with pytest.raises(ConfigError, match=f"{port}-{port}"):
            LinkServer(HOST, (port, port), SECRET, WAIT_S)
    assert num_free(HOST, (port, port)) == 1
    with pytest.raises(TransportError, match=r"cannot be bound on 192\.0\.2\.1"):
        num_free("192.0.2.1", (port, port))
