"""Broadcasts between CPU holders over TCP, through torch's gloo."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from weightsync.errors import TransportError

__all__ = ["GlooTransport"]


class GlooTransport:
    """A gloo process group of our own: torch's default group stays whoever's it is."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._group: Any = None  # a ProcessGroupGloo; its stub lacks the collectives
        self._timeout = timedelta(seconds=0)

    def offer(self, host: str) -> str:
        """Serve the rendezvous on a port that the system chooses: ``host:port``."""
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._store = store
        return f"{host}:{store.port}"

    def open(self, rendezvous: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Connect to every rank, on the interface that `rendezvous` is reached by."""
        self._timeout = timedelta(seconds=timeout_s)
        host, _, port = rendezvous.rpartition(":")
        try:
            if self._store is None:
                self._store = TCPStore(host, int(port), is_master=False, timeout=self._timeout)
            self._store.set_timeout(self._timeout)
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = self._timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(host))]
            self._group = ProcessGroupGloo(PrefixStore("weightsync", self._store), rank, num_ranks, options)
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"gloo rank {rank} of {num_ranks} could not join at {rendezvous}: {error}"
            ) from error

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """One gloo broadcast."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, self._timeout
        try:
            self._group.broadcast([data], options).wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(
                f"gloo broadcast of {data.numel()} bytes from rank {root}: {error}"
            ) from error

    def barrier(self) -> None:
        """One gloo barrier."""
        options = BarrierOptions()
        options.timeout = self._timeout
        try:
            self._group.barrier(options).wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"gloo barrier: {error}") from error

    def close(self) -> None:
        """Close the connections; the store goes with the last reference to it."""
        self._group = None
        self._store = None


def _own_address(rendezvous_host: str) -> str:
    """This host's address on the network that leads to the rendezvous."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous_host, 9))
        return str(probe.getsockname()[0])
