"""The protocol for writing buckets into an engine rank's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from weightsync.plan import Box
from weightsync.protocol.messages import Digests, HolderDigests

if TYPE_CHECKING:
    import torch


class Sink(Protocol):
    """One rank's writer for one update, called by `EngineFeed.receive` in the engine rank."""

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Store the pieces of one bucket.

        The data are views of a shared slot, which may be overwritten once this returns. Copies of the data
        must have ended by then, also on a device.
        """

    def written(self, by_holder: HolderDigests | None) -> None:
        """Called instead of `take` for all further pieces, which are in memory already.

        Either the holder has written the pieces into exported memory, or the pieces belong to frozen tensors
        and have not changed. `by_holder` are the holder's digests of the pieces, if any.
        """

    def finish(self) -> None:
        """Make the weights live, after the last piece. Raises TransportError if pieces are missing."""

    def digests(self) -> Digests:
        """Return a digest per tensor of the plan, uint64[num_tensors]. Called after `finish`."""


PieceView: TypeAlias = "tuple[int, Box, torch.Tensor]"
"""A tensor's number in the plan, a box, and the box's data: shape ``box.extent``, in the plan's dtype."""
