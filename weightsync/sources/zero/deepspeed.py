"""Reads weights of DeepSpeed's engine: partitions of ZeRO-3, whole parameters of ZeRO-0, 1 and 2.

Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.errors import ConfigError
from weightsync.memory.addresses import AddressGuard
from weightsync.memory.tensors import named_tensors
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.module import ModuleSource, weights_of
from weightsync.sources.tensors import Guard
from weightsync.sources.tested import warn_untested
from weightsync.sources.zero_partitions import PART, is_partitioned, require_current, with_memory


class DeepSpeedSource(ModuleSource):
    """Reads the engine of ``deepspeed.initialize``, with the names of the module's ``state_dict``.

    Partitions are read in place, on the GPU or offloaded to the host, also the partitions of parameters that
    persist whole on every rank.
    """

    _partitioned: Sequence[tuple[str, Any]] = ()

    @property
    def _module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.model.module
        return module

    def _weights(self) -> LocalWeights:
        check_engine(self.model)
        held, tied = named_tensors(self._module)
        self._partitioned = [(name, tensor) for name, tensor in held.items() if is_partitioned(tensor)]
        return weights_of(held, tied)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return with_memory(super()._tensors())

    def _watch(self, weights: LocalWeights) -> Guard:
        return _Guard(self._module, weights.tensors, part=PART)

    def _finish(self) -> None:
        """Require that partitions are up to date.

        Partitions of offloaded weights were checked before the offload.
        """
        if not self._offloaded:
            require_current(self._rank, self._partitioned)


class _Guard(AddressGuard):
    """Addresses of an engine's module."""

    def as_before(self, model: Any) -> bool:  # noqa: ANN401
        return super().as_before(model.module)


def check_engine(engine: Any) -> None:  # noqa: ANN401
    """Raise ConfigError if tensors of the engine have no place in the model."""
    kind = type(engine).__name__
    if kind == "PipelineEngine":
        raise ConfigError("self.model", kind, "DeepSpeed's pipeline engine is not supported: use ZeRO-3")
    if engine.autotp_size() > 1:
        remedy = "DeepSpeed does not say how AutoTP cuts parameters: use ZeRO-3 without it"
        raise ConfigError("tensor_parallel.autotp_size", engine.autotp_size(), remedy)
    warn_untested("deepspeed")
