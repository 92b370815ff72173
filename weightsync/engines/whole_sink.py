"""Gives whole tensors to an engine's own loader, if its live parameters cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from weightsync.channel.sink import PieceView
from weightsync.engines.live_digest import LiveParameters
from weightsync.engines.live_writer import Missing
from weightsync.memory.digests import tensor_digests
from weightsync.plan import Box, Plan
from weightsync.protocol.messages import Digests, LiveDigest

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
        live: of what the loader made of them, if `parameters` are given.
        is_copied: the holder wrote the live parameters of an equal engine, and the loader got nothing.
    """

    def __init__(
        self,
        plan: Plan,
        make_loader: Callable[[], Loader],
        device: torch.device,
        parameters: LiveParameters | None = None,
    ) -> None:
        """`make_loader` is called when tensors come.

        `parameters`: the live ones, if the loader makes other bytes of the tensors.
        """
        self._plan, self._make_loader, self._device = plan, make_loader, device
        self._loader: Loader | None = None
        self._parameters = parameters
        self.live: LiveDigest | None = None
        self.is_copied = False
        self._shapes = {meta.name: meta.shape for meta in plan.tensors}
        self._missing = Missing(plan)
        self._parts: dict[int, torch.Tensor] = {}
        self._batch: list[tuple[str, torch.Tensor]] = []
        self._batch_nbytes = 0
        self._digests = np.zeros(len(plan.tensors), dtype=np.uint64)

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Copy a bucket's pieces into whole tensors, and pass on complete ones."""
        self._loading()
        complete = [tensor for tensor, box, data in pieces if self._put(tensor, box, data)]
        synchronize(self._device)
        self._add(complete)

    def finish(self) -> None:
        """Finish the loader."""
        if not self.is_copied:
            self._missing.require_none()
            self._hand_over()
            self._loading().finish()
        synchronize(self._device)

    def digests(self) -> Digests:
        """Return the digests of the tensors that the loader got, after taking `live`."""
        if self._parameters is not None:
            self.live = self._parameters.digest()
        return self._digests

    def written(self) -> None:
        """Note that the live parameters are copies of an equal engine's."""
        assert self._parameters is not None, "a holder wrote into a rank that exported nothing"
        assert self._loader is None, "a holder wrote what tensors had begun to fill"
        self.is_copied = True

    def abandon(self) -> None:
        """End the update early, as `Loader.abandon` does."""
        if self._loader:
            self._loader.abandon()

    def _put(self, tensor: int, box: Box, data: torch.Tensor) -> bool:
        """Copy a piece. Returns whether its tensor is now complete."""
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
        self._digests[complete] = tensor_digests(whole)
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


_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def as_loaded(
    name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor, or views of its experts, under the names that they have in checkpoints.

    Transformers stacks ``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj`` [E, H, I]. Loaders
    of SGLang, and of vLLM before 0.32, silently skip these names; all take ``experts.0.gate_proj.weight``
    [I, H] and its like. Stacks of other shapes are not split.

    Args:
        shapes: the shapes of all tensors of the checkpoint, by name.
    """
    base = name.removesuffix(_GATE_UP).removesuffix(_DOWN)
    if base == name or not _is_stack(shapes.get(base + _GATE_UP, ()), shapes.get(base + _DOWN, ())):
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        prefix = f"{base}.experts.{number}"
        if name.endswith(_DOWN):
            yield f"{prefix}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up


def _is_stack(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether shapes are those of a stack. Transposed stacks are left to the models' own loaders."""
    return len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])
