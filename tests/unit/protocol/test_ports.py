"""Listening on a port of a range."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from tests.patience import patient
from weightsync.config import Ports
from weightsync.errors import ConfigError, TransportError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.ports import listen
from weightsync.readers import Read, open_reader, serve
from weightsync.recipes.training.trainer import GrpoTrainer
from weightsync.transports import transport_class
from weightsync.transports.store import NetworkStore, StoreServer

HERE = "127.0.0.1"


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


@pytest.fixture
def three() -> Iterator[Ports]:
    """A range of three ports that are free now, the middle one taken by somebody else."""
    for first in range(20011, 29000, 7):
        with contextlib.ExitStack() as taken:
            try:
                probes = [taken.enter_context(socket.socket()) for _ in range(3)]
                for at, probe in enumerate(probes):
                    probe.bind((HERE, first + at))
            except OSError:  # one is taken
                continue
            probes[0].close()
            probes[2].close()
            probes[1].listen()
            yield first, first + 2
            return


def test_ports_of_a_range_are_taken_in_turn_and_given_back(three: Ports) -> None:
    first, last = three
    with listen(HERE, three, "no") as one, listen(HERE, three, "no") as other:
        assert [one.getsockname()[1], other.getsockname()[1]] == [first, last]
        with pytest.raises(ConfigError) as raised:
            listen(HERE, three, "no")
        assert raised.value.field == "sync.ports"
        assert raised.value.value == f"{first}-{last}"
        assert "all 3 are in use on 127.0.0.1: give a wider range" in raised.value.remedy
    with listen(HERE, three, "no") as again:
        assert again.getsockname()[1] == first


def test_without_a_range_any_free_port_is_taken() -> None:
    with listen(HERE, None, "no") as one, listen(HERE, None, "no") as other:
        assert len({one.getsockname()[1], other.getsockname()[1]}) == 2


@pytest.mark.parametrize("ports", [None, (29600, 29601)])
def test_an_address_that_is_not_ours_is_no_matter_of_ports(ports: Ports | None) -> None:
    with pytest.raises(TransportError, match=r"^nobody can be served on 192\.0\.2\.1: "):
        listen("192.0.2.1", ports, "nobody can be served")


def test_all_that_a_holder_serves_is_within_the_range(three: Ports) -> None:
    buffer, target = SharedBuffer.create(4096), SharedBuffer.create(4096)
    buffer.tensor[:] = 7
    server = serve(buffer, "h", HERE, "zeromq", "", three)
    transport = transport_class("gloo")()
    address = transport.offer(HERE, three)
    assert [port_of(server.offer.endpoint), port_of(address)] == [*three]
    with pytest.raises(ConfigError, match=r"sync\.ports"):
        serve(buffer, "h", HERE, "zeromq", "", three)
    reader = open_reader([target], {"h": server.offer}, may_map=False)
    assert reader.read([Read("h", 0, 0, 0, 4096)], patient(5)) == {"h": 4096}
    assert (target.tensor == 7).all()
    transport.open(address, 0, 1, patient(5))
    for each in (reader, server, transport, buffer, target):
        each.close()
    StoreServer(HERE, three).close()


def test_a_server_that_ended_leaves_its_port_to_the_next(three: Ports) -> None:
    for _ in range(3):
        server = StoreServer(HERE, three)
        store = NetworkStore(server.address, patient(5))
        store.set("key", "value")
        assert port_of(server.address) == three[0]
        store.close()
        server.close()


def test_the_trainers_of_a_recipe_meet_within_the_range(
    three: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: HERE)
    trainer = GrpoTrainer.__new__(GrpoTrainer)
    meeting = trainer.listen(three)
    assert meeting == (HERE, three[0])
    one, other = (TCPStore(*meeting, is_master=False) for _ in range(2))
    one.set("key", "value")
    assert other.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError), socket.socket() as elsewhere:
        elsewhere.connect(("127.0.0.2", three[0]))  # torch alone would listen on every address
