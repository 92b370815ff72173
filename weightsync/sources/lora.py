"""Publishes a LoRA adapter that PEFT trains, in a model that is plain or sharded by FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError, nearest
from weightsync.memory.addresses import local_tensor
from weightsync.memory.tensors import byte_strides, meta_of, named_tensors
from weightsync.plan import RankLayout
from weightsync.protocol.adapters import LORA_A, LORA_B, AdapterSpec
from weightsync.sources.deepspeed import is_partitioned
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.module import segment_of
from weightsync.sources.tensors import TensorSource

_PEFT = "base_model.model."
_KINDS = {LORA_A: "lora_A", LORA_B: "lora_B"}
_MORE = {
    "modules_to_save": "modules_to_save",
    "lora_embedding_A": "an embedding's LoRA",
    "lora_magnitude_vector": "DoRA's magnitude",
}
"""What PEFT's modules have beside A and B, by attribute."""


class LoraSource(TensorSource):
    """One adapter of a PEFT model. Each version is copied to host memory: A, and B times the scaling.

    Engines then need not know ``lora_alpha``, and whether PEFT divides it by the rank or by its root.
    """

    def __init__(self, model: Any, adapter: str) -> None:  # noqa: ANN401 - PEFT's, or what wraps it
        """Raises ConfigError if `model` has no such adapter, or one that engines cannot serve."""
        if not isinstance(model, torch.nn.Module):
            remedy = "adapters are read from a module that PEFT made"
            raise ConfigError("self.model", type(model).__name__, remedy)
        super().__init__(model)
        self._adapter = adapter
        self._held: dict[str, torch.Tensor] = {}
        self._scalings = _scalings(model, adapter)

    def spec(self, name: str) -> AdapterSpec:
        """Return the adapter's tensors, for engines that call it `name`."""
        return AdapterSpec(name, tuple(meta_of(*each) for each in self._parameters().items()))

    def _parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the live parameters by the names of the spec."""
        tensors, _ = named_tensors(self.model)
        found = {
            _name(path, suffix): tensors[f"{path}.{kind}.{self._adapter}.weight"]
            for path in self._scalings
            for suffix, kind in _KINDS.items()
        }
        for name, parameter in found.items():
            if is_partitioned(parameter):
                remedy = f"{name} is partitioned by ZeRO-3: adapters are read from plain modules and FSDP2"
                raise ConfigError("self.model", type(self.model).__name__, remedy)
        return found

    def _weights(self) -> LocalWeights:
        segments, metas = [], []
        for name, parameter in self._parameters().items():
            held = torch.empty(local_tensor(parameter).shape, dtype=parameter.dtype)
            self._held[name] = held
            metas.append(meta_of(name, parameter))
            segments.append(dataclasses.replace(segment_of(name, parameter), strides=byte_strides(held)))
        return LocalWeights(RankLayout(tuple(metas), tuple(segments)), self._held)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._held

    def _watch(self, weights: LocalWeights) -> _Unmoved:
        return _Unmoved()

    @torch.no_grad()
    def _finish(self) -> None:
        """Copy the adapter as it is now. Raises StateError if it has other modules or shapes than before."""
        self._scalings = _scalings(self.model, self._adapter)
        now = {name: local_tensor(parameter) for name, parameter in self._parameters().items()}
        for name in sorted(now.keys() ^ self._held.keys()):
            where = "is new" if name in now else "is gone"
            raise StateError(f"{name} of adapter {self._adapter} {where}: register the adapter again")
        for path, scaling in self._scalings.items():
            for suffix in _KINDS:
                name = _name(path, suffix)
                held, live = self._held[name], now[name]
                if held.shape != live.shape:
                    was = f"{tuple(held.shape)} before, and is {tuple(live.shape)}"
                    raise StateError(f"{name} of adapter {self._adapter} was {was}: register it again")
                held.copy_(live * scaling if suffix == LORA_B else live)


def _name(path: str, suffix: str) -> str:
    """Return a module's name in the base's checkpoint, with `suffix`. Other wrappers come before PEFT's."""
    return path.split(_PEFT, 1)[-1] + suffix


class _Unmoved:
    """The copies on the host never move, and `_finish` looks at what they are of."""

    strays: frozenset[str] = frozenset()

    def as_before(self, model: object) -> bool:
        return True

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return []


def _scalings(model: torch.nn.Module, adapter: str) -> Mapping[str, float]:
    """Return the scaling of each module that the adapter has, by the module's name.

    Raises ConfigError if there are none, or some do more than A and B.
    """
    found: dict[str, float] = {}
    known: set[str] = set()
    for path, module in model.named_modules():
        known.update(getattr(module, "lora_A", ()))
        if reason := _more_than_lora(module, adapter):
            raise ConfigError("adapter", adapter, f"{reason} in {path} has no place in an engine's slots")
        if adapter in getattr(module, "lora_A", ()):
            scaling: Any = module.scaling
            found[path] = float(scaling[adapter])
    if not found:
        raise ConfigError("adapter", adapter, nearest(adapter, known) if known else "the model has none")
    return found


def _more_than_lora(module: torch.nn.Module, adapter: str) -> str:
    """Return what an adapter has in a module beside A and B; "" for nothing."""
    for kind, called in _MORE.items():
        names: Collection[str] = getattr(module, kind, None) or ()
        if adapter in names:
            return called
    flags: Mapping[str, bool] = getattr(module, "lora_bias", None) or {}
    return "lora_bias" if flags.get(adapter) else ""
