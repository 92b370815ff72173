"""Weights of DeepSpeed's engine with a LoRA adapter that it trains, merged for engines without slots."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from weightsync.memory.tensors import named_tensors
from weightsync.plan import RankLayout
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.lora.merged_weights import MergedWeights, Target, is_frozen
from weightsync.sources.own_tensors import OwnTensors
from weightsync.sources.zero.deepspeed import DeepSpeedSource
from weightsync.sources.zero_partitions import is_partitioned, part_of, run_of


class MergedZeroSource(DeepSpeedSource):
    """A `DeepSpeedSource` that publishes what a `MergedLoraSource` does, each rank its run of W + BA.

    All ranks publish together: DeepSpeed gathers A and B for it, and partitions them again.
    """

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - DeepSpeed's
        adapter: str,
        exclude: Collection[str] = (),
        *,
        frozen: Collection[str] = (),
    ) -> None:
        """`adapter` is PEFT's name. `exclude` and `frozen` are `TrainerShard`'s, with the base's names."""
        super().__init__(engine, exclude, frozen=frozen)
        self._merged = MergedWeights(adapter)

    def _weights(self) -> LocalWeights:
        return self._merged.of(self.model.module, super()._weights())

    def _selected(self, weights: LocalWeights) -> RankLayout:
        held, _ = named_tensors(self.model.module)
        frozen = {name for name, each in held.items() if is_frozen(each)}
        return self._merged.freeze(super()._selected(weights), frozen)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return {**super()._tensors(), **self._merged.buffers()}

    def _watch(self, weights: LocalWeights) -> OwnTensors:
        own = self._merged.without(weights)
        return OwnTensors(super()._watch(own), own.tensors)

    @torch.no_grad()
    def _finish(self) -> None:
        """Merge this rank's runs, as they are now. Raises StateError if other modules are adapted now."""
        import deepspeed

        super()._finish()
        targets = [*self._merged.targets(self.model.module)]
        with deepspeed.zero.GatheredParameters([each for its in targets for each in (its.a, its.b)]):
            for its in targets:
                _merge(its)


def _merge(its: Target) -> None:
    """Add BA to this rank's run of W, unless PEFT has. A and B are whole."""
    weight = its.module.base_layer.weight
    start, stop = run_of(weight) if is_partitioned(weight) else (0, weight.numel())
    base = part_of(weight).reshape(-1)[: stop - start]
    if its.is_merged:
        its.held.view(-1)[: stop - start].copy_(base)
        return
    columns = its.a.shape[1]
    first, last = start // columns, -(-stop // columns)  # the rows in which the run is
    rows = its.b[first:last].float() @ its.a.float() * its.scaling
    change = rows.reshape(-1)[start - first * columns : stop - first * columns]
    its.held.view(-1)[: stop - start].copy_(base.float() + change.to(base.device))
