"""Publishes a LoRA adapter that PEFT trains, in a model that is plain or sharded by FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.memory.addresses import local_tensor
from weightsync.memory.tensors import byte_strides, meta_of
from weightsync.plan import RankLayout
from weightsync.protocol.adapters import LORA_A, LORA_B, AdapterSpec
from weightsync.sources.deepspeed import is_partitioned
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.module import segment_of
from weightsync.sources.peft_modules import adapted_modules, base_name
from weightsync.sources.tensors import TensorSource

_KINDS = {LORA_A: "lora_A", LORA_B: "lora_B"}


class LoraSource(TensorSource):
    """One adapter of a PEFT model. Each version is copied to host memory: A, and B times the scaling.

    Engines then need not know ``lora_alpha``, and whether PEFT divides it by the rank or by its root.
    """

    def __init__(self, model: Any, adapter: str) -> None:  # noqa: ANN401 - PEFT's, or what wraps it
        """Raises ConfigError if `model` is no module."""
        if not isinstance(model, torch.nn.Module):
            remedy = "adapters are read from a module that PEFT made"
            raise ConfigError("self.model", type(model).__name__, remedy)
        super().__init__(model)
        self._adapter = adapter
        self._held: dict[str, torch.Tensor] = {}

    def spec(self, name: str) -> AdapterSpec:
        """Return the adapter's tensors, for engines that call it `name`. Raises ConfigError as `layout`."""
        return AdapterSpec(name, tuple(meta_of(each, live) for each, (live, _) in self._parameters().items()))

    def _parameters(self) -> Mapping[str, tuple[torch.Tensor, float]]:
        """Return the live parameters by the names of the spec, and what each is multiplied with.

        Raises ConfigError if there are none, or if the adapter does more than A and B.
        """
        self.model.state_dict(keep_vars=True)  # FSDP shards again what it has gathered
        found: dict[str, tuple[torch.Tensor, float]] = {}
        for path, module in adapted_modules(self.model, self._adapter).items():
            for suffix, kind in _KINDS.items():
                name, live = base_name(path) + suffix, getattr(module, kind)[self._adapter].weight
                found[name] = live, float(module.scaling[self._adapter]) if suffix == LORA_B else 1.0
                if is_partitioned(live):
                    remedy = f"{name} is partitioned by ZeRO-3: give plain modules or FSDP2"
                    raise ConfigError("self.model", type(self.model).__name__, remedy)
        return found

    def _weights(self) -> LocalWeights:
        segments, metas = [], []
        self._held = {}
        for name, (live, _) in self._parameters().items():
            local = local_tensor(live)
            held = self._held[name] = torch.empty(local.shape, dtype=live.dtype, pin_memory=local.is_cuda)
            metas.append(meta_of(name, live))
            segments.append(dataclasses.replace(segment_of(name, live), strides=byte_strides(held)))
        return LocalWeights(RankLayout(tuple(metas), tuple(segments)), self._held)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._held

    def _watch(self, weights: LocalWeights) -> _Unmoved:
        return _Unmoved()

    @torch.no_grad()
    def _finish(self) -> None:
        """Copy the adapter as it is now. Raises StateError if it has other modules or shapes than before."""
        now = self._parameters()
        for name in sorted(now.keys() ^ self._held.keys()):
            where = "is new" if name in now else "is gone"
            raise StateError(f"{name} of adapter {self._adapter} {where}: register the adapter again")
        for name, (parameter, scaling) in now.items():
            held, live = self._held[name], local_tensor(parameter)
            if held.shape != live.shape:
                was = f"{tuple(held.shape)} before, and is {tuple(live.shape)}"
                raise StateError(f"{name} of adapter {self._adapter} was {was}: register it again")
            held.copy_(live if scaling == 1 else live * scaling, non_blocking=True)
        for device in {local_tensor(parameter).device for parameter, _ in now.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


class _Unmoved:
    """The copies on the host never move, and `_finish` looks at what they are of."""

    strays: frozenset[str] = frozenset()

    def as_before(self, model: object) -> bool:
        return True

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return []
