"""Merges a LoRA adapter that PEFT trains into its base, for engines that have no adapter slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.memory.addresses import is_sharded, local_tensor
from weightsync.memory.tensors import named_tensors, segment_view
from weightsync.plan import RankLayout, Segment
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.lora.peft_modules import (
    SavedModule,
    adapted_modules,
    base_name,
    path_in_state,
    saved_modules,
)
from weightsync.sources.zero_partitions import is_partitioned

_WEIGHT = ".base_layer.weight"


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A weight W that the adapter adapts: its memory for the merged weight, and this rank's boxes of W.

    `held` is laid out as this rank's part of W, so that `boxes` are true of both.
    """

    held: torch.Tensor
    boxes: tuple[Segment, ...]


class Merged:
    """A `Transform` that publishes W + BA, times the scaling, in place of each W that is adapted.

    Each version is computed in float32 from the base, which stays as it is, and rounded once to the base's
    dtype: versions leave no rounding behind. Tensors of the base that nobody trains only travel with the
    first update (`TrainerShard`'s `frozen`). Modules that the adapter saves whole replace the base's modules.
    While PEFT has the adapter merged (``merge_adapter``), W is published as it is.

    All ranks publish together: A and B are gathered by the trainer's own framework.
    """

    def __init__(self, adapter: str) -> None:
        """`adapter` is PEFT's name."""
        self._adapter = adapter
        self._adapted: dict[str, _Adapted] = {}
        self._saved: Sequence[SavedModule] = ()

    def apply(self, model: torch.nn.Module, weights: LocalWeights) -> LocalWeights:
        """Return the weights with the base's names, see `Transform`."""
        self._saved = saved_modules(model, self._adapter)
        before, self._adapted = self._adapted, {}
        for name in self._find(model, weights.layout.tied):
            live, known = local_tensor(weights.tensors[name]), before.get(name)
            if known and _is_alike(known.held, live):
                held = known.held
            else:
                held = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype, device=live.device)
            boxes = tuple(each for each in weights.layout.segments if each.buffer == name)
            self._adapted[name] = _Adapted(held, boxes)
        named = named_tensors(model)[0].items()
        parameters = {name: each for name, each in named if isinstance(each, torch.nn.Parameter)}
        still = {name for name, each in parameters.items() if not each.requires_grad}
        computed = {_buffer(name): its.held for name, its in self._adapted.items()}
        layout = self._as_base(weights.layout, still.difference(self._adapted))
        return replace(weights, layout=layout, computed={**weights.computed, **computed})

    @torch.no_grad()
    def run(self, model: torch.nn.Module, live: Mapping[str, torch.Tensor]) -> None:
        """Merge this rank's boxes, as they are now.

        Raises StateError if other modules are adapted now, or if PEFT has merged another adapter.
        """
        _require_no_other(model, self._adapter)
        modules = self._layers(model)
        for name in sorted(modules.keys() ^ self._adapted.keys()):
            raise StateError(f"{name} has begun or ceased to be adapted: call connect() again")
        factors = {
            name: tuple(kind[self._adapter].weight for kind in (module.lora_A, module.lora_B))
            for name, module in modules.items()
        }
        with _gathered([each for pair in factors.values() for each in pair]):
            for name, module in modules.items():
                base, its = local_tensor(live[name]), self._adapted[name]
                if self._adapter in _merged(module):
                    its.held.copy_(base)
                else:
                    a, b = map(_whole, factors[name])
                    _merge(its, base, a, b, float(module.scaling[self._adapter]))

    def _find(self, model: torch.nn.Module, pairs: Iterable[tuple[str, str]]) -> Iterable[str]:
        """Return the names of adapted weights. Raises ConfigError if the adapter cannot be merged."""
        tied = {name for pair in pairs for name in pair}
        for saved in self._saved:
            if saved.is_of_adapter and any(map(saved.has, tied)):
                raise self._error(f"do not save {saved.path}: its weight is tied")
        modules = self._layers(model)
        for name, module in modules.items():
            path = name.removesuffix(_WEIGHT)
            if any(saved.has(path) for saved in self._saved):
                raise self._error(f"leave {path} out: PEFT saves what it is in whole")
            if parameter := getattr(module, "parameter_name", ""):
                raise self._error(f"leave {path}, whose {parameter} it adapts, out")
            if getattr(module, "fan_in_fan_out", False):
                raise self._error(f"{path} is transposed (fan_in_fan_out)")
            if name in tied:
                raise self._error(f"leave {path} out: its weight is tied")
        return modules

    def _error(self, remedy: str) -> ConfigError:
        return ConfigError("merge", self._adapter, remedy)

    def _as_base(self, layout: RankLayout, frozen: set[str]) -> RankLayout:
        """Return the layout with the base's names and merged weights, without A and B."""
        names = {meta.name: new for meta in layout.tensors if (new := self._served_as(meta.name))}
        segments = tuple(
            replace(each, buffer=_buffer(each.buffer)) if each.buffer in self._adapted else each
            for each in layout.segments
            if each.tensor in names
        )
        tensors = tuple(meta for meta in layout.tensors if meta.name in names)
        aliases = {alias: new for alias, _ in layout.tied if (new := self._served_as(alias))}
        tied = tuple(pair for pair in layout.tied if pair[0] in aliases and pair[1] in names)
        still = tuple(name for name in names if name in frozen)
        return RankLayout(tensors, segments, tied, frozen=still).renamed(names | aliases)

    def _served_as(self, name: str) -> str | None:
        """Return the name of a tensor in the base's checkpoint, None if engines do not get the tensor."""
        saved = next((each for each in self._saved if each.has(name)), None)
        served = saved.served_as(name) if saved else name
        if served is None or ".lora_" in served:
            return None
        return base_name(served).replace(".base_layer.", ".")

    def _layers(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return PEFT's modules by the names of their weights."""
        found = adapted_modules(model, self._adapter, saves=True)
        return {path_in_state(path) + _WEIGHT: module for path, module in found.items()}


def _merge(its: _Adapted, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """Add BA to this rank's boxes of W."""
    for segment in its.boxes:
        rows, columns = segment.box.slices()
        change = b[rows].float() @ a[:, columns].float() * scaling
        part = segment_view(base, segment)
        segment_view(its.held, segment).copy_(part.float() + change.to(part.device))


def _gathered(parameters: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Gather parameters that ZeRO-3 has partitioned, which is a collective."""
    if not any(map(is_partitioned, parameters)):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return gathered


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of A or B. If it is a DTensor, all ranks have to call this."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if tensors differ in values only."""
    kinds = [(each.shape, each.stride(), each.dtype, each.device) for each in (one, other)]
    return kinds[0] == kinds[1]


def _merged(module: Any) -> Sequence[str]:  # noqa: ANN401 - PEFT's
    """Return the adapters that PEFT has merged into a module's own weights."""
    return getattr(module, "merged_adapters", ())


def _require_no_other(model: torch.nn.Module, adapter: str) -> None:
    """Raise StateError if the base has another adapter's product in it, in any module."""
    for path, module in model.named_modules():
        if others := [each for each in _merged(module) if each != adapter]:
            raise StateError(f"{path} has adapter {others[0]} merged into it: call unmerge_adapter() first")


def _buffer(name: str) -> str:
    """Return a name that no tensor of a model has."""
    return f"{name} merged"
