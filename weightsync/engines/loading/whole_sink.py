"""Gives whole tensors to an engine's own loader, if its live parameters cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from weightsync.channel.sink import PieceView
from weightsync.engines.loading.live_digest import LiveParameters
from weightsync.engines.loading.live_writer import Missing
from weightsync.memory.kernels.digests import BoxPart, DigestSums
from weightsync.memory.stacked_experts import as_loaded
from weightsync.plan import Box, Plan
from weightsync.protocol.messages import Digests, HolderDigests, LiveDigest
from weightsync.quantising.stored_places import StoredPlaces

_BATCH_NBYTES = 64 << 20


class Loader(Protocol):
    """One update through an engine's own loader."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take whole tensors under a checkpoint's names. May keep them until `finish`."""

    def finish(self) -> None:
        """Make the tensors live, after all came. Raises RuntimeError if the loader left parameters out."""

    def abandon(self) -> None:
        """End the update early. The weights are a mix, and the next update starts over."""


class WholeSink:
    """A Sink that assembles whole tensors. Digests are of the loader's input.

    Attributes:
        live: the digest of the loader's results, if `parameters` are given.
        is_copied: the holder wrote the live parameters of an equal engine, and the loader got nothing.
        quantized: the holder quantised, and the loader got nothing. None if it did not.
    """

    def __init__(
        self,
        plan: Plan,
        make_loader: Callable[[], Loader],
        device: torch.device,
        parameters: LiveParameters | None = None,
        places: StoredPlaces | None = None,
    ) -> None:
        """
        Args:
            make_loader: called when tensors come.
            parameters: the live parameters, if the loader converts tensors.
            places: where the holder may write quantised tensors.
        """
        self._plan, self._make_loader, self._device = plan, make_loader, device
        self._loader: Loader | None = None
        self._parameters, self._places = parameters, places
        self.quantized: HolderDigests | None = None
        self._stored: Digests | None = None
        self.live: LiveDigest | None = None
        self.is_copied = False
        self._shapes = {meta.name: meta.shape for meta in plan.tensors}
        self._missing = Missing(plan)
        self._parts: dict[int, torch.Tensor] = {}
        self._batch: list[tuple[str, torch.Tensor]] = []
        self._batch_nbytes = 0
        self._digests = DigestSums(len(plan.tensors))

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Copy a bucket's pieces into whole tensors, and pass on complete ones."""
        self._loading()
        complete = [tensor for tensor, box, data in pieces if self._put(tensor, box, data)]
        synchronize(self._device)
        self._add(complete)

    def finish(self) -> None:
        """Finish the loader, or compare the live parameters with the holder's results."""
        if self.quantized:
            assert self._places, "a holder quantised for a rank that did not allow it"
            self._stored = self._places.require(self.quantized.stored)
        elif not self.is_copied:
            self._missing.require_none()
            self._hand_over()
            self._loading().finish()
        synchronize(self._device)

    def digests(self) -> Digests:
        """Return the digests of the tensors that the loader got, after taking `live`."""
        if self._parameters is not None:
            self.live = self._parameters.digest(self.quantized is not None, self._stored)
        return self.quantized.wholes if self.quantized else self._digests.result()

    def written(self, by_holder: HolderDigests | None = None) -> None:
        """Note that the holder quantised, or that the live parameters are copies of an equal engine's."""
        assert self._parameters is not None, "a holder wrote into a rank that exported nothing"
        assert self._loader is None, "a holder wrote what tensors had begun to fill"
        self.quantized, self.is_copied = by_holder, by_holder is None

    def abandon(self) -> None:
        """End the update early, as `Loader.abandon` does."""
        if self._loader:
            self._loader.abandon()

    def _put(self, tensor: int, box: Box, data: torch.Tensor) -> bool:
        """Copy a piece. Returns True if the piece's tensor is now complete."""
        shape = self._plan.tensors[tensor].shape
        if tensor not in self._parts:
            # New memory, since the loader keeps tensors until a module is complete.
            self._parts[tensor] = torch.empty(shape, dtype=data.dtype, device=self._device)
        self._parts[tensor][box.slices()].copy_(data)
        return self._missing.count(tensor, box)

    def _add(self, complete: Sequence[int]) -> None:
        """Digest tensors that are complete, and pass them on."""
        if not complete:
            return
        whole = [self._parts.pop(tensor) for tensor in complete]
        self._digests.add([BoxPart.whole(*each) for each in zip(complete, whole, strict=True)])
        for tensor, data in zip(complete, whole, strict=True):
            meta = self._plan.tensors[tensor]
            self._batch.extend(as_loaded(meta.name, data, self._shapes))
            self._batch_nbytes += meta.nbytes
            if self._batch_nbytes >= _BATCH_NBYTES:
                self._hand_over()

    def _hand_over(self) -> None:
        self._loading().load(self._batch)
        self._batch, self._batch_nbytes = [], 0

    def _loading(self) -> Loader:
        self._loader = self._loader or self._make_loader()
        return self._loader


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
