"""The rendezvous of a new communicator's ranks: a store that rank 0 serves."""

from __future__ import annotations

from concurrent.futures import TimeoutError as Late

from weightsync.config import TlsFiles
from weightsync.errors import TransportError, WireError
from weightsync.protocol.daemon import on_daemon
from weightsync.transports.roll_call import RollCall
from weightsync.transports.store import NetworkStore

SLACK_S = 1.0
"""Time after a rank's deadline until the rank has named the missing ranks."""


def join_store(
    address: str, rank: int, num_ranks: int, timeout_s: float, tls: TlsFiles | None = None
) -> NetworkStore:
    """Return the store at `address` once every rank has signed in.

    Raises TransportError with the ranks that did not sign in within `timeout_s`.
    """
    store = NetworkStore(address, timeout_s, tls)
    place = address.rpartition("@")[2]
    joining = on_daemon(lambda: RollCall(store, rank, num_ranks).sign_in(timeout_s))
    try:
        joining.result(timeout_s + SLACK_S)
    except Late as error:
        store.close()
        cause = "rank 0, which hosts it, does not answer"
        raise TransportError(f"rank {rank} of {num_ranks} could not join at {place}: {cause}") from error
    except (RuntimeError, ValueError, WireError) as error:
        store.close()
        raise TransportError(f"rank {rank} of {num_ranks} could not join at {place}: {error}") from error
    except TransportError:
        store.close()
        raise
    return store
