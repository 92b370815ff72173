"""Tensors that SGLang's loaders fuse into one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

_Named = tuple[str, torch.Tensor]


class FusedParts:
    """Holds a tensor back until the tensors have come with which a loader fuses it.

    DeepSeek's loader fuses ``q_a_proj`` and ``kv_a_proj_with_mqa``, and drops the first without a word if the
    second comes in another call of ``load_weights``.
    """

    def __init__(self, packed: Mapping[str, Sequence[str]]) -> None:
        """`packed`: last parts of the paths of layers that are fused, by the layer that they become."""
        self._groups = {part: tuple(parts) for parts in packed.values() for part in parts}
        self._held: dict[tuple[str, str, tuple[str, ...]], list[_Named]] = {}

    def complete(self, weights: Iterable[_Named]) -> list[_Named]:
        """Add tensors. Returns those that wait for no other."""
        ready: list[_Named] = []
        for name, tensor in weights:
            path, _, leaf = name.rpartition(".")
            path, _, part = path.rpartition(".")
            group = self._groups.get(part, (part,))
            key = path, leaf, group
            held = self._held.setdefault(key, [])
            held.append((name, tensor))
            if len(held) == len(group):
                ready += self._held.pop(key)
        return ready

    def rest(self) -> list[_Named]:
        """Return the tensors that still wait after the last tensor."""
        rest = [each for held in self._held.values() for each in held]
        self._held.clear()
        return rest
