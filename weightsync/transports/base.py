"""What moves bytes between holders. A transport knows ranks and byte buffers, nothing of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Broadcast", "Op", "Pending", "Recv", "Send", "Transport"]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """`data` (uint8, one dimension, contiguous) goes from rank `root` into every rank's `data`.

    It concerns every rank, and has the same size on each.
    """

    data: torch.Tensor
    root: int


@dataclass(frozen=True, slots=True)
class Send:
    """`data` (uint8, one dimension, contiguous) goes to rank `peer`, which receives as many bytes."""

    data: torch.Tensor
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    """`data` (uint8, one dimension, contiguous) is filled by what rank `peer` sends."""

    data: torch.Tensor
    peer: int


Op = Broadcast | Send | Recv


class Pending(Protocol):
    """Operations under way."""

    def wait(self) -> None:
        """Return when this rank's bytes are there (or have left). Blocks the host; called once.

        Raises TransportError when a rank is lost or late, naming the ranks that did not come where that
        can be known, or with the cause of an abort. The communicator is of no further use then, on any
        rank: where one gives up first, NCCL's kernels of another can take a broadcast for done that is
        not. So what came counts only if every rank's wait returned, which somebody above has to ask.
        """


class Transport(Protocol):
    """One rank's end of one communicator. Called from one thread at a time, except for `abort`."""

    def offer(self, host: str) -> str:
        """Called on rank 0 only, before `open`: where the other ranks meet it, as one line of text.

        `host` is this host's address as its peers reach it.
        """

    def open(self, rendezvous: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Join the communicator; returns when every rank has. Device memory: on the current device.

        Raises TransportError, which names the ranks that did not come within `timeout_s`. The same
        `timeout_s` bounds each later `start` together with its wait, counted from `start`, or from the end
        of the operation before it if that is later.
        """

    def start(self, ops: Sequence[Op]) -> Pending:
        """Begin `ops` as one group and return without waiting for the peers, where the library can.

        Every rank gives the ops that concern it, grouped alike and in the same order. They run after
        the work that is on the caller's current CUDA stream. Several starts may be pending at once,
        and run in turn. Their data must live until they have been waited for, and what one start's
        broadcasts have next to each other in memory must be so on every rank. Raises TransportError.
        """

    def abort(self, cause: str) -> None:
        """Give the communicator up: every pending wait and later start raises TransportError(`cause`).

        May be called from any thread. Peers that wait for this rank are told where that is possible.
        """

    def close(self) -> None:
        """Leave, also out of a broken communicator. Safe to call twice; a new one can then be opened."""
