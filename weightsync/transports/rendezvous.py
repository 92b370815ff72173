"""Where the ranks of a new communicator meet: a TCP store that rank 0 serves."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import TimeoutError as Late
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from weightsync.errors import TransportError
from weightsync.transports.base import Broadcast, Op
from weightsync.transports.roll_call import RollCall, aside

__all__ = ["join_store", "own_address", "peers_of", "serve_store"]


def serve_store(host: str) -> tuple[Store, str]:
    """A store on a port that the system chooses, and its address ``host:port``."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def join_store(served: Store | None, address: str, rank: int, num_ranks: int, timeout_s: float) -> Store:
    """The store at `address` (`served` where it is this rank's own), once every rank has signed in.

    Raises TransportError, which names the ranks that did not come within `timeout_s`.
    """

    def join() -> Store:
        store = served
        if store is None:
            host, _, port = address.rpartition(":")
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        store.set_timeout(timedelta(seconds=timeout_s))
        RollCall(PrefixStore("roll", store), rank, num_ranks).sign_in(timeout_s)
        return store

    joining = aside(join)
    try:
        return joining.result(2 * timeout_s + 1)  # to connect, to sign in
    except Late as error:
        cause = "rank 0, which hosts it, does not answer"
        raise TransportError(f"rank {rank} of {num_ranks} could not join at {address}: {cause}") from error
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"rank {rank} of {num_ranks} could not join at {address}: {error}") from error


def own_address(rendezvous: str) -> str:
    """This host's address on the network that leads to the rendezvous."""
    host = rendezvous.rpartition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def peers_of(ops: Sequence[Op], rank: int, num_ranks: int) -> list[int]:
    """The other ranks that `ops` concern, ascending."""
    if any(isinstance(op, Broadcast) for op in ops):
        return [peer for peer in range(num_ranks) if peer != rank]
    return sorted({op.peer for op in ops if not isinstance(op, Broadcast)} - {rank})
