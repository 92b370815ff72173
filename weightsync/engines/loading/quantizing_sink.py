"""Quantises buckets into live parameters in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightsync.channel.sink import PieceView
from weightsync.engines.loading.live_digest import LiveParameters
from weightsync.errors import TransportError
from weightsync.plan import Plan
from weightsync.protocol.messages import Digests, HolderDigests, LiveDigest
from weightsync.quantising.quantizing_tables import QuantizingTables


class QuantizingSink:
    """A Sink that quantises arriving tensors into live parameters. Digests are of the whole tensors.

    Attributes:
        live: the digest of the live parameters.
        is_copied: the holder wrote the live parameters of an equal engine, and no bucket came.
        quantized: the holder quantised, and no bucket came. None if it did not.
    """

    def __init__(self, tables: QuantizingTables, plan: Plan, parameters: LiveParameters) -> None:
        self._tables, self._plan, self._parameters = tables, plan, parameters
        self.live: LiveDigest | None = None
        self.is_copied = False
        self.quantized: HolderDigests | None = None
        self._stored: Digests | None = None
        self._next = 0
        self._memory: torch.Tensor | None = None
        self._digests = np.zeros(len(plan.tensors), np.uint64)

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Quantise the tensors that a bucket completes, and write them."""
        assert bucket == self._next
        if self._memory is None:
            # Freed between updates, when the engine needs the memory. Mostly the next update gets the same
            # memory again.
            self._memory = torch.empty(self._tables.nbytes, dtype=torch.uint8, device=pieces[0][2].device)
            self._tables.bind(self._memory)
        stream = torch.cuda.current_stream()
        self._tables.run(bucket, stream)
        stream.synchronize()
        self._next += 1

    def written(self, by_holder: HolderDigests | None = None) -> None:
        """Note that the holder quantised, or that the live parameters are copies of an equal engine's."""
        assert self._next == 0, "a holder wrote what buckets had begun to fill"
        self.quantized, self.is_copied = by_holder, by_holder is None

    def finish(self) -> None:
        """Compare the live parameters with the stored bytes."""
        if self.is_copied:
            return
        if not self.quantized and self._next != self._plan.num_buckets:
            raise TransportError(f"{self._next} of {self._plan.num_buckets} buckets came")
        made = self.quantized or self._tables.result()
        self._stored = self._tables.places.require(made.stored)
        self._digests, self._memory = made.wholes, None

    def digests(self) -> Digests:
        """Return the digests of the whole tensors, after taking `live`. They are zeros if it `is_copied`."""
        self.live = self._parameters.digest(self.quantized is not None, self._stored)
        return self._digests

    def abandon(self) -> None:
        """End the update early. The next one writes everything again."""
