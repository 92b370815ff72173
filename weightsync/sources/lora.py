"""Publishes a LoRA adapter that PEFT trains, in a model that is plain or sharded by FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError, StateError
from weightsync.memory.addresses import AddressGuard, local_tensor
from weightsync.memory.tensors import byte_strides, meta_of, named_tensors
from weightsync.plan import RankLayout
from weightsync.protocol.adapters import LORA_A, LORA_B, AdapterSpec
from weightsync.sources.deepspeed import is_partitioned
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.module import segment_of
from weightsync.sources.peft_modules import adapted_modules, base_name
from weightsync.sources.tensors import TensorSource

_KINDS = {LORA_A: "lora_A", LORA_B: "lora_B"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """A or B of one of PEFT's modules.

    Attributes:
        module: PEFT's.
        parameter: what the trainer optimises.
        is_scaled: whether it is B, which the module's scaling multiplies.
    """

    module: Any
    parameter: torch.Tensor
    is_scaled: bool


class LoraSource(TensorSource):
    """One adapter of a PEFT model. Each version is a copy where the model is: A, and B times the scaling.

    Engines then need not know ``lora_alpha``, and whether PEFT divides it by the rank or by its root. On a
    GPU, holders read the copy in place.
    """

    def __init__(self, model: Any, adapter: str) -> None:  # noqa: ANN401 - PEFT's, or what wraps it
        """Raises ConfigError if `model` is no module."""
        if not isinstance(model, torch.nn.Module):
            remedy = "adapters are read from a module that PEFT made"
            raise ConfigError("self.model", type(model).__name__, remedy)
        super().__init__(model)
        self._adapter, self._dtype = adapter, ""
        self._found: Mapping[str, _Trained] = {}
        self._lives: dict[str, torch.Tensor] = {}
        self._model_guard: AddressGuard | None = None
        self._held: dict[str, torch.Tensor] = {}

    def spec(self, name: str) -> AdapterSpec:
        """Return the adapter's tensors, for engines that call it `name`. Raises ConfigError as `layout`."""
        return AdapterSpec.of(name, [meta_of(key, its.parameter) for key, its in self._look_up().items()])

    def cast(self, dtype: str) -> None:
        """Copy to `dtype` from the next `layout` on, such as ``bfloat16``: that of the engines' slots."""
        self._dtype = dtype

    @property
    def is_on_gpu(self) -> bool:
        """Whether all of the adapter is on a GPU."""
        return all(local_tensor(its.parameter).is_cuda for its in self._look_up().values())

    def _look_up(self) -> Mapping[str, _Trained]:
        """Find the adapter's parameters, by the names of the spec.

        Raises ConfigError if there are none, or if the adapter does more than A and B.
        """
        self.model.state_dict(keep_vars=True)  # FSDP shards again what it has gathered
        found: dict[str, _Trained] = {}
        for path, module in adapted_modules(self.model, self._adapter).items():
            for suffix, kind in _KINDS.items():
                name, live = base_name(path) + suffix, getattr(module, kind)[self._adapter].weight
                found[name] = _Trained(module, live, suffix == LORA_B)
                if is_partitioned(live):
                    remedy = f"{name} is partitioned by ZeRO-3: give plain modules or FSDP2"
                    raise ConfigError("self.model", type(self.model).__name__, remedy)
        return found

    def _weights(self) -> LocalWeights:
        segments, metas = [], []
        self._held, self._found, self._model_guard = {}, self._look_up(), None
        for name, its in self._found.items():
            local = local_tensor(its.parameter)
            dtype = getattr(torch, self._dtype) if self._dtype else local.dtype
            held = self._held[name] = torch.empty(local.shape, dtype=dtype, device=local.device)
            metas.append(dataclasses.replace(meta_of(name, its.parameter), dtype=meta_of(name, held).dtype))
            segment = segment_of(name, its.parameter)
            segments.append(dataclasses.replace(segment, strides=byte_strides(held)))
        return LocalWeights(RankLayout(tuple(metas), tuple(segments)), self._held)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._held

    def _watch(self, weights: LocalWeights) -> _Unmoved:
        return _Unmoved()

    @torch.no_grad()
    def _finish(self) -> None:
        """Copy the adapter as it is now. Raises StateError if it has other modules or shapes than before."""
        if self._model_guard is None or not self._model_guard.as_before(self.model):
            self._found = self._same(self._look_up())
            self._lives = {name: local_tensor(its.parameter) for name, its in self._found.items()}
            self._model_guard = AddressGuard(self.model, named_tensors(self.model)[0])
        for device in {held.device for held in self._held.values() if held.is_cuda}:
            torch.cuda.synchronize(device)  # whatever stream trained it
        scaled = [name for name, its in self._found.items() if its.is_scaled]
        factors = [float(self._found[name].module.scaling[self._adapter]) for name in scaled]
        # One by one, hundreds of small copies take longer than all of their bytes.
        products = torch._foreach_mul([self._lives[name] for name in scaled], factors)
        values = self._lives | dict(zip(scaled, products, strict=True))
        torch._foreach_copy_([*self._held.values()], [values[name] for name in self._held])

    def _same(self, now: Mapping[str, _Trained]) -> Mapping[str, _Trained]:
        """Return `now`. Raises StateError if it has other names or shapes than before."""
        for name in sorted(now.keys() ^ self._held.keys()):
            where = "is new" if name in now else "is gone"
            raise StateError(f"{name} of adapter {self._adapter} {where}: register the adapter again")
        for name, its in now.items():
            held, live = self._held[name], local_tensor(its.parameter)
            if held.shape != live.shape:
                was = f"{tuple(held.shape)} before, and is {tuple(live.shape)}"
                raise StateError(f"{name} of adapter {self._adapter} was {was}: register it again")
        return now


class _Unmoved:
    """The copies never move, and `_finish` looks at what they are of."""

    strays: frozenset[str] = frozenset()

    def as_before(self, model: object) -> bool:
        return True

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return []
