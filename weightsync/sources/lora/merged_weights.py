"""What takes the place of a base's tensors where a LoRA adapter of PEFT's is merged, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.memory.addresses import local_tensor
from weightsync.memory.tensors import byte_strides
from weightsync.plan import RankLayout, Segment
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.lora.peft_modules import (
    SavedModule,
    adapted_modules,
    base_name,
    path_in_state,
    saved_modules,
)

_WEIGHT = ".base_layer.weight"


@dataclass(frozen=True, slots=True)
class Target:
    """One of the weights that are merged.

    Attributes:
        name: the base's, in the model's ``state_dict``.
        module: PEFT's.
        a: the parameter A, which may be sharded.
        b: the parameter B, likewise.
        scaling: the factor of BA.
        is_merged: whether PEFT has merged the adapter into the base (``merge_adapter``).
        held: memory for this rank's part of the result, as the base's part is laid out, without gaps.
    """

    name: str
    module: Any
    a: Any
    b: Any
    scaling: float
    is_merged: bool
    held: torch.Tensor


class MergedWeights:
    """Memory of this rank's merged weights, which stays where it is, and the names that they travel with.

    Modules that the adapter saves whole take the place of the base's, as they are.
    """

    def __init__(self, adapter: str) -> None:
        """`adapter` is PEFT's name."""
        self._adapter = adapter
        self._held: dict[str, torch.Tensor] = {}
        self._saved: Sequence[SavedModule] = ()

    def of(self, model: torch.nn.Module, weights: LocalWeights) -> LocalWeights:
        """Return what travels of `model`, of which `weights` are all tensors.

        Allocates memory for merged weights. Raises ConfigError if the adapter cannot be merged.
        """
        self._allocate(model, weights)
        return LocalWeights(self._as_base(weights), {**weights.tensors, **self.buffers()})

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the merged weights, by names that no tensor of a model has."""
        return {_buffer(name): each for name, each in self._held.items()}

    def without(self, weights: LocalWeights) -> LocalWeights:
        """Return what is the model's own of the result of `of`."""
        merged = self.buffers()
        return replace(weights, tensors={n: each for n, each in weights.tensors.items() if n not in merged})

    def freeze(self, layout: RankLayout, frozen: Collection[str]) -> RankLayout:
        """Return a layout that `of` made, with tensors frozen, too, whose buffers are named in `frozen`."""
        still = {segment.tensor for segment in layout.segments if segment.buffer in frozen}
        names = (meta.name for meta in layout.tensors if meta.name in still.union(layout.frozen))
        return replace(layout, frozen=tuple(names))

    def targets(self, model: torch.nn.Module) -> Iterator[Target]:
        """Yield what is to be merged. Raises StateError if other modules of `model` are adapted now.

        Raises StateError if PEFT has merged another adapter into the base.
        """
        _require_no_other(model, self._adapter)
        modules = {path + _WEIGHT: module for path, module in self._adapted(model).items()}
        for name in sorted(modules.keys() ^ self._held.keys()):
            raise StateError(f"{name} has begun or ceased to be adapted: call connect() again")
        for name, module in modules.items():
            a, b = (kind[self._adapter].weight for kind in (module.lora_A, module.lora_B))
            scaling, is_merged = float(module.scaling[self._adapter]), self._adapter in _merged(module)
            yield Target(name, module, a, b, scaling, is_merged, self._held[name])

    def _allocate(self, model: torch.nn.Module, weights: LocalWeights) -> None:
        before, self._held = self._held, {}
        tied = {name for pair in weights.layout.tied for name in pair}
        self._saved = saved_modules(model, self._adapter)
        for saved in (each for each in self._saved if each.is_of_adapter):
            if any(map(saved.has, tied)):
                raise ConfigError("merge", self._adapter, f"do not save {saved.path}: its weight is tied")
        for path, module in self._adapted(model).items():
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
            self._held[name] = held

    def _as_base(self, weights: LocalWeights) -> RankLayout:
        """Return the layout with the base's names, without A and B, and with merged weights."""
        layout = weights.layout
        served = {meta.name: self._served_as(meta.name) for meta in layout.tensors}
        kept = {name: _plain(new) for name, new in served.items() if new and ".lora_" not in new}
        segments = tuple(
            self._merged(replace(segment, tensor=kept[segment.tensor]), weights.tensors)
            for segment in layout.segments
            if segment.tensor in kept
        )
        tensors = tuple(replace(meta, name=kept[meta.name]) for meta in layout.tensors if meta.name in kept)
        pairs = ((self._served_as(alias), self._served_as(name)) for alias, name in layout.tied)
        tied = tuple((_plain(alias), _plain(name)) for alias, name in pairs if alias and name)
        return RankLayout(tensors, segments, tied)

    def _merged(self, segment: Segment, live: Mapping[str, torch.Tensor]) -> Segment:
        """Return where a segment is in what is merged, or itself."""
        held = self._held.get(segment.buffer)
        if held is None:
            return segment
        has_gaps = not local_tensor(live[segment.buffer]).is_contiguous()
        strides = byte_strides(held) if has_gaps else segment.strides
        return replace(segment, buffer=_buffer(segment.buffer), strides=strides)

    def _served_as(self, name: str) -> str | None:
        """Return the name that a tensor has without PEFT's copies, None if the adapter does not use it."""
        saved = next((each for each in self._saved if each.has(name)), None)
        return saved.served_as(name) if saved else name

    def _adapted(self, model: torch.nn.Module) -> dict[str, Any]:
        found = adapted_modules(model, self._adapter, saves=True)
        return {path_in_state(path): module for path, module in found.items()}


def is_frozen(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is a parameter that nobody trains."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def _merged(module: Any) -> Sequence[str]:  # noqa: ANN401 - PEFT's
    """Return the adapters that PEFT has merged into a module's own weights."""
    return getattr(module, "merged_adapters", ())


def _require_no_other(model: torch.nn.Module, adapter: str) -> None:
    """Raise StateError if the base has another adapter's product in it, in any module."""
    for path, module in model.named_modules():
        if others := [each for each in _merged(module) if each != adapter]:
            raise StateError(f"{path} has adapter {others[0]} merged into it: call unmerge_adapter() first")


def _plain(name: str) -> str:
    return base_name(name).replace(".base_layer.", ".")


def _buffer(name: str) -> str:
    """Return a name that no tensor of a model has."""
    return f"{name} merged"
