"""Weights of a model with a LoRA adapter that PEFT trains, merged for engines that have no adapter slots."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from weightsync.memory.addresses import is_sharded, local_tensor
from weightsync.plan import Box, RankLayout
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.lora.merged_weights import MergedWeights, is_frozen
from weightsync.sources.module import ModuleSource
from weightsync.sources.own_tensors import OwnTensors


class MergedLoraSource(ModuleSource):
    """A `ModuleSource` that publishes W + BA, times the scaling, in place of each W that is adapted.

    Each version is computed in float32 from the base, which stays as it is, and rounded once to the base's
    dtype: versions leave no rounding behind. The results have memory of their own. Tensors of the base that
    nobody trains travel with the first update alone (`TrainerShard`'s `frozen`). While PEFT has the adapter
    merged (``merge_adapter``), W is published as it is.

    All ranks publish together: A and B are gathered over the trainer's own process group.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        adapter: str,
        exclude: Collection[str] = (),
        *,
        frozen: Collection[str] = (),
    ) -> None:
        """`adapter` is PEFT's name. `exclude` and `frozen` are `TrainerShard`'s, with the base's names."""
        super().__init__(model, exclude, frozen=frozen)
        self._merged = MergedWeights(adapter)
        self._boxes: Mapping[str, Box] = {}

    def _weights(self) -> LocalWeights:
        weights = super()._weights()
        self._boxes = {segment.buffer: segment.box for segment in weights.layout.segments}
        return self._merged.of(self.model, weights)

    def _selected(self, weights: LocalWeights) -> RankLayout:
        frozen = {name for name, each in weights.tensors.items() if is_frozen(each)}
        return self._merged.freeze(super()._selected(weights), frozen)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return {**super()._tensors(), **self._merged.buffers()}

    def _watch(self, weights: LocalWeights) -> OwnTensors:
        own = self._merged.without(weights)
        return OwnTensors(super()._watch(own), own.tensors)

    @torch.no_grad()
    def _finish(self) -> None:
        """Merge this rank's rows, as they are now. Raises StateError if other modules are adapted now."""
        super()._finish()
        live = super()._tensors()
        for its in self._merged.targets(self.model):
            if its.is_merged:
                its.held.copy_(local_tensor(live[its.name]))
                continue
            rows, columns = self._boxes[its.name].slices()
            change = _whole(its.b)[rows].float() @ _whole(its.a)[:, columns].float() * its.scaling
            its.held.copy_(local_tensor(live[its.name]).float() + change)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of A or B. If it is sharded, all ranks have to call this."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole
