"""Addresses by the route to a peer."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from tests.patience import patient
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.routes import host_of, interface_of, joined, keep_to_interface_of, own_address
from weightsync.readers import Read, open_reader, serve
from weightsync.transports import transport_class

HAS_IPV6 = any(each.address == "::1" for found in psutil.net_if_addrs().values() for each in found)
BOTH = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here"))]
VARIABLES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_an_endpoint_is_taken_apart_as_it_was_joined(host: str) -> None:
    endpoint = joined(host, 29600)
    assert endpoint in ("10.0.0.1:29600", "[fd00::1]:29600")
    assert host_of(endpoint) == host_of(f"tcp://{endpoint}") == host_of(f"secret@{endpoint}") == host


@pytest.mark.parametrize("host", BOTH)
def test_a_loopback_peer_is_reached_from_loopback(host: str) -> None:
    assert own_address(f"secret@{joined(host, 29600)}") == host
    assert interface_of(host) == ""


@pytest.mark.parametrize("host", BOTH)
def test_ranks_meet_and_read_each_other_on_either_family(host: str) -> None:
    transport, buffer, target = transport_class("gloo")(), SharedBuffer.create(64), SharedBuffer.create(64)
    buffer.tensor[:] = 7
    transport.open(transport.offer(host), 0, 1, patient(5))
    server = serve(buffer, "h", host, "zeromq")
    assert host_of(server.offer.endpoint) == host
    reader = open_reader([target], {"h": server.offer}, may_map=False)
    reader.read([Read("h", 0, 0, 0, 64)], patient(5))
    assert (target.tensor == 7).all()
    for each in (reader, server, transport, buffer, target):
        each.close()


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interfaces, of which the second leads to the peers."""
    address = type("Address", (), {"family": socket.AF_INET, "address": "192.0.2.7"})
    near = type("Address", (), {"family": socket.AF_INET6, "address": "fd00::7"})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [address], "eth1": [near]})
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)


@pytest.mark.usefixtures("interfaces")
def test_gloo_and_nccl_are_kept_to_the_interface_that_leads_to_peers() -> None:
    keep_to_interface_of("fd00:0::7")
    assert [os.environ[variable] for variable in VARIABLES] == ["eth1", "=eth1"]


@pytest.mark.usefixtures("interfaces")
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    keep_to_interface_of("192.0.2.7")
    assert [os.environ[variable] for variable in VARIABLES] == ["eth0", "ib"]


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.1.1"])
def test_loopback_and_unknown_addresses_choose_nothing(address: str) -> None:
    keep_to_interface_of(address)
    assert not {*VARIABLES} & {*os.environ}
