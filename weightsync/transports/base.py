"""What moves bytes between holders. A transport knows ranks and byte buffers, nothing of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Transport"]


class Transport(Protocol):
    """One rank's end of one communicator. Its methods block and are called from one thread at a time."""

    def offer(self, host: str) -> str:
        """Called on rank 0 only, before `open`: where the other ranks meet it, as one line of text.

        `host` is this host's address as its peers reach it.
        """

    def open(self, rendezvous: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Join the communicator; returns when every rank has. Raises TransportError.

        `timeout_s` bounds this call and every later one.
        """

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Send `data` (uint8, one dimension, contiguous) from `root` to every rank's `data`.

        Every rank calls it with the same size, in the same order. When it returns, this rank's
        bytes are there. Raises TransportError when a rank is lost or late; the communicator is
        of no further use then.
        """

    def barrier(self) -> None:
        """Wait until every rank is here. Raises TransportError."""

    def close(self) -> None:
        """Leave, also out of a broken communicator. Safe to call twice."""
