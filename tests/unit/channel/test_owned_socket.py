"""A socket that nobody closed does not hold up the collector of garbage."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import zmq

from weightsync.channel.private_socket import own_socket


class Owner:
    def __init__(self, endpoint: str) -> None:
        self.socket, self.close = own_socket(self, zmq.DEALER, 1024)
        self.socket.connect(endpoint)
        self.cycle = self


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_socket_is_closed_when_its_owner_is_collected(tmp_path: Path, is_closed: bool) -> None:
    owner = Owner(f"ipc://{tmp_path}/nobody")
    socket = weakref.ref(owner.socket)
    if is_closed:
        owner.close()
        owner.close()
        assert owner.socket.closed
    del owner
    gc.collect()
    assert socket() is None
