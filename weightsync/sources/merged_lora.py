"""Weights of a model with a LoRA adapter that PEFT trains, merged for engines that have no adapter slots."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.memory.addresses import is_sharded, local_tensor
from weightsync.memory.tensors import byte_strides
from weightsync.plan import Box, RankLayout
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.module import ModuleSource, OwnTensors
from weightsync.sources.peft_modules import SavedModule, adapted_modules, base_name, saved_modules

_WEIGHT = ".base_layer.weight"


class MergedLoraSource(ModuleSource):
    """A `ModuleSource` that publishes W + BA, times the scaling, in place of each W that is adapted.

    Each version is computed in float32 from the base, which stays as it is, and rounded once to the base's
    dtype: versions leave no rounding behind. The results have memory of their own. Modules that the adapter
    saves whole take the place of the base's, as they are. Tensors of the base that nobody trains travel with
    the first update alone (`TrainerShard`'s `frozen`).

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
        self._adapter = adapter
        self._merged: dict[str, torch.Tensor] = {}
        self._boxes: dict[str, Box] = {}
        self._saved: Sequence[SavedModule] = ()

    def _weights(self) -> LocalWeights:
        weights = super()._weights()
        self._allocate(weights)
        return LocalWeights(self._as_base(weights.layout), {**weights.tensors, **self._buffers()})

    def _selected(self, weights: LocalWeights) -> RankLayout:
        layout, merged = super()._selected(weights), self._buffers()
        still = {
            segment.tensor
            for segment in layout.segments
            if segment.buffer not in merged and _is_frozen(weights.tensors[segment.buffer])
        }
        frozen = (meta.name for meta in layout.tensors if meta.name in still.union(layout.frozen))
        return replace(layout, frozen=tuple(frozen))

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return {**super()._tensors(), **self._buffers()}

    def _watch(self, weights: LocalWeights) -> OwnTensors:
        merged = self._buffers()
        return OwnTensors(self.model, {n: each for n, each in weights.tensors.items() if n not in merged})

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {_buffer(name): each for name, each in self._merged.items()}

    def _allocate(self, weights: LocalWeights) -> None:
        """Make room for merged weights, which stays where it is. Raises ConfigError if one cannot be."""
        before, self._merged = self._merged, {}
        tied = {name for pair in weights.layout.tied for name in pair}
        self._saved = saved_modules(self.model, self._adapter)
        for saved in (each for each in self._saved if each.is_of_adapter):
            if any(map(saved.has, tied)):
                raise ConfigError("merge", self._adapter, f"do not save {saved.path}: its weight is tied")
        for path, module in self._adapted().items():
            name = path + _WEIGHT
            if any(saved.has(path) for saved in self._saved):
                raise ConfigError("merge", self._adapter, f"leave {path} out: PEFT saves what it is in whole")
            if parameter := getattr(module, "parameter_name", ""):
                raise ConfigError("merge", self._adapter, f"leave {path}, whose {parameter} it adapts, out")
            if getattr(module, "fan_in_fan_out", False):
                raise ConfigError("merge", self._adapter, f"{path} is transposed (fan_in_fan_out)")
            if name in tied:
                raise ConfigError("merge", self._adapter, f"leave {path} out: its weight is tied")
            live, held = local_tensor(weights.tensors[name]), before.get(name)
            if held is None or (held.shape, held.dtype, held.device) != (live.shape, live.dtype, live.device):
                held = torch.empty_like(live, memory_format=torch.contiguous_format)
            self._merged[name] = held

    def _as_base(self, layout: RankLayout) -> RankLayout:
        """Return `layout` with the base's names, without A and B, and with merged weights."""
        served = {meta.name: self._served_as(meta.name) for meta in layout.tensors}
        kept = {name: _plain(new) for name, new in served.items() if new and ".lora_" not in new}
        segments = []
        for segment in layout.segments:
            if segment.tensor not in kept:
                continue
            named = replace(segment, tensor=kept[segment.tensor])
            if segment.buffer in self._merged:
                self._boxes[segment.buffer] = segment.box
                strides = byte_strides(self._merged[segment.buffer])
                named = replace(named, buffer=_buffer(segment.buffer), strides=strides)
            segments.append(named)
        tensors = tuple(replace(meta, name=kept[meta.name]) for meta in layout.tensors if meta.name in kept)
        pairs = ((self._served_as(alias), self._served_as(name)) for alias, name in layout.tied)
        tied = tuple((_plain(alias), _plain(name)) for alias, name in pairs if alias and name)
        return RankLayout(tensors, tuple(segments), tied)

    def _served_as(self, name: str) -> str | None:
        """Return the name that a tensor has without PEFT's copies, None if the adapter does not use it."""
        saved = next((each for each in self._saved if each.has(name)), None)
        return saved.served_as(name) if saved else name

    def _adapted(self) -> dict[str, Any]:
        return adapted_modules(self.model, self._adapter, saves=True)

    @torch.no_grad()
    def _finish(self) -> None:
        """Merge this rank's rows, as they are now. Raises StateError if other modules are adapted now."""
        super()._finish()
        live, modules = super()._tensors(), self._adapted()
        for name in sorted({path + _WEIGHT for path in modules} ^ self._merged.keys()):
            raise StateError(f"{name} has begun or ceased to be adapted: call connect() again")
        for path, module in modules.items():
            rows, columns = self._boxes[path + _WEIGHT].slices()
            a, b = (_whole(kind[self._adapter].weight) for kind in (module.lora_A, module.lora_B))
            change = b[rows].float() @ a[:, columns].float() * float(module.scaling[self._adapter])
            self._merged[path + _WEIGHT].copy_(local_tensor(live[path + _WEIGHT]).float() + change)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of A or B. If it is sharded, all ranks have to call this."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def _plain(name: str) -> str:
    return base_name(name).replace(".base_layer.", ".")


def _buffer(name: str) -> str:
    """Return a name that no tensor of a model has."""
    return f"{name} merged"


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
