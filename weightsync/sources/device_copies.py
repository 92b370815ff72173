"""Copies of weights from a GPU to the send buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.plan import Piece, Plan
from weightsync.protocol.messages import Digests, Published
from weightsync.sources.in_place import InPlace


class DeviceCopies:
    """One epoch's pieces on a GPU. They are digested there, and copied to the send buffer."""

    def __init__(
        self, plan: Plan, copies: Sequence[tuple[Piece, torch.Tensor, torch.Tensor]], device: torch.device
    ) -> None:
        """`copies` has each piece, its memory on `device`, and its place in the send buffer, of one shape."""
        self._copies, self._device = [(held, place) for _, held, place in copies], device
        self._digests = InPlace(plan, [(piece.tensor, piece.box, held) for piece, held, _ in copies], device)

    def run(self, count: bool) -> Published:
        """Wait until the weights are written, then digest and copy them, with a cast where dtypes differ.

        The digests are of the weights, not of the copies, so that a wrong copy is found.
        """
        self._digests.begin()
        with torch.cuda.device(self._device), torch.no_grad():
            for held, place in self._copies:
                place.copy_(held, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return self._digests.result(count)

    def digest_again(self) -> Digests:
        """Digest the weights as they are now."""
        return self._digests.digest_again()
