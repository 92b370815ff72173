"""What writes the pieces of a bucket into an engine rank's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from weightsync.plan import Box

if TYPE_CHECKING:
    import torch

    from weightsync.protocol.messages import Digests

__all__ = ["PieceView", "Sink"]


class Sink(Protocol):
    """One rank's writer for one update; lives in the process that owns the parameters."""

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Store one bucket's pieces.

        Their data are views of a shared bucket that is overwritten once this returns: what is kept
        must be copied, and copies on a device must have ended.
        """

    def written(self) -> None:
        """In place of every `take`: the holder has written all pieces into the memory that was exported."""

    def finish(self) -> Digests:
        """All pieces came: make the weights live; returns a digest per tensor of the plan."""


PieceView: TypeAlias = "tuple[int, Box, torch.Tensor]"
"""The tensor's number in the plan, which box of it, and its data: shape ``box.extent``, the plan's dtype."""
