"""The store that ranks meet in, beside what the transports' contract asks of it."""

from __future__ import annotations

import gc

from tests.patience import patient
from weightsync.transports.store import NetworkStore, StoreServer


def test_a_store_that_nobody_closed_disconnects_without_a_warning() -> None:
    """As of a communicator that broke: zmq warns of sockets that are dropped open."""
    server = StoreServer("127.0.0.1")
    store = NetworkStore(server.address, patient(5))
    store.set("key", "value")
    del store
    gc.collect()
    server.close()
