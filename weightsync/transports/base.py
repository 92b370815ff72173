"""The protocols for moving byte buffers between the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weightsync.config import Ports, TlsFiles


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Copy `data` (uint8, one dimension, contiguous) of rank `root` into every rank's `data`.

    Every rank takes part, with the same size.
    """

    data: torch.Tensor
    root: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send `data` (uint8, one dimension, contiguous) to rank `peer`, which receives as many bytes."""

    data: torch.Tensor
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Fill `data` (uint8, one dimension, contiguous) with the bytes that rank `peer` sends."""

    data: torch.Tensor
    peer: int


Op = Broadcast | Send | Recv


class Pending(Protocol):
    """Started operations."""

    def wait(self) -> None:
        """Wait until this rank's bytes have arrived or left. Blocks the host. Called once per `start`.

        Raises TransportError if a rank is lost or late, with the missing ranks if known, or with the cause of
        an abort. The communicator is then unusable on every rank. If one rank gives up first, NCCL's kernels
        on another rank may report an incomplete broadcast as done. So received bytes are only valid if every
        rank's wait returned, which the caller must check.
        """


class Transport(Protocol):
    """One rank's end of one communicator. A holder calls it from one thread at a time, except for `abort`."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        """`tls`: this process's files, if the rendezvous is to speak TLS."""

    def offer(self, host: str, ports: Ports | None = None) -> str:
        """Start the rendezvous and return its address, one line. Called on rank 0 only, before `open`.

        `host` is this host's address for peers. The rendezvous listens on one of `ports`, by default on any
        free port. Raises ConfigError if all `ports` are in use.
        """

    def open(self, rendezvous: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Join the communicator, on the current device for device memory. Returns when every rank has joined.

        Raises TransportError with the ranks that did not join within `timeout_s`. A later `start` and the
        wait together also have `timeout_s`, from `start` or from the end of the previous operation, whichever
        is later.
        """

    def set_timeout(self, timeout_s: float) -> None:
        """Give operations `timeout_s` from now on. Called after `open`, while no operation is running."""

    def start(self, ops: Sequence[Op]) -> Pending:
        """Start `ops` as one group. Does not wait for the peers if the library allows that.

        Every rank passes the ops that concern this rank, in the same groups and order. Ops run after the work
        on the caller's current CUDA stream. Several starts may be pending; they run in turn. The data of a
        start must exist until its wait returned. Broadcasts of one start that are neighbours in memory must
        be neighbours on every rank. Raises TransportError.
        """

    def abort(self, cause: str) -> None:
        """Give up the communicator: pending waits and later starts raise TransportError(`cause`).

        Called from any thread. Peers that wait for this rank are told if possible.
        """

    def close(self) -> None:
        """Leave the communicator, even if broken. Then a new one can be opened. Safe to call twice."""
