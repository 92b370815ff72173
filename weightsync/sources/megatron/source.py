"""Reads weights of Megatron-Core's models in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.memory.addresses import AddressGuard
from weightsync.sources.local_weights import LocalWeights
from weightsync.sources.megatron.bridge import config_of
from weightsync.sources.megatron.chunks import as_modules, held
from weightsync.sources.megatron.families import find_family
from weightsync.sources.megatron.ready import finish
from weightsync.sources.megatron.rules import Family
from weightsync.sources.megatron.weights import local_weights
from weightsync.sources.selection import Names
from weightsync.sources.tensors import TensorSource
from weightsync.sources.tested import warn_untested

_REMEDY = (
    "a model of Megatron's does not say what its checkpoint is called: set self.hf_config to its "
    "configuration, or self.source = MegatronSource(chunks, family=..., vocab_size=...)"
)


class MegatronSource(TensorSource):
    """Reads a ``GPTModel``, or the chunks of a pipeline stage, in Megatron's wrappers.

    `TrainerShard` makes one from ``self.model`` and ``self.hf_config``. For a family of your own, set it::

        self.source = MegatronSource(self.chunks, family=mine, vocab_size=151936)

    Tensors are named as in the checkpoint, but experts are parts of stacks, as engines name them. Rows that
    pad the vocabulary do not travel. If the distributed optimizer overlaps gathers with the forward pass, the
    gathers are completed first, see `finish`: all ranks of a data-parallel group must then publish, as in an
    update.

    Args:
        model: a model or a list of model chunks.
        exclude: patterns of names that are left out, such as ``value_head.*``: Megatron's for parameters, or
            the checkpoint's for tensors.
        names: other names for the checkpoint's tensors, see `Names`.
        frozen: patterns of names in the checkpoint, as in `TrainerShard`.
        offloads: as in `TensorSource`.
        hf_config: the checkpoint's configuration, with `model_type` and `vocab_size`.
        family: instead of its ``model_type``, another, a `Family` of your own, or a bridge of mbridge or
            Megatron-Bridge, whose names are taken. With a bridge, `hf_config` is the bridge's by default.
        vocab_size: instead of its ``vocab_size``, the checkpoint's number of tokens, without padding.

    Raises:
        ConfigError: the family or the vocabulary is not known, or the bridge cannot be used.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        exclude: Collection[str] = (),
        *,
        names: Names | None = None,
        frozen: Collection[str] = (),
        offloads: bool = False,
        hf_config: Any = None,  # noqa: ANN401 - transformers' PretrainedConfig, or another with both attributes
        family: Family | str | Any = None,  # noqa: ANN401 - a bridge of another library
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(model, exclude, names=names, frozen=frozen, offloads=offloads, hf_config=hf_config)
        warn_untested("megatron-core")
        if family is not None and not isinstance(family, (Family, str)):
            hf_config = hf_config or config_of(family)
        family = family or getattr(hf_config, "model_type", None)
        if family is None:
            raise ConfigError("family", family, _REMEDY)
        self._family = find_family(family)
        self._vocab_size = vocab_size or getattr(hf_config, "vocab_size", None)
        self._excluded = tuple(exclude)

    def _weights(self) -> LocalWeights:
        return local_weights(self.model, self._family, vocab_size=self._vocab_size, exclude=self._excluded)

    def _watch(self, weights: LocalWeights) -> _Guard:
        return _Guard(self.model, weights.tensors)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor for _, _, name, tensor in held(self.model)}

    def _finish(self) -> None:
        if not self._offloaded:  # else they were completed before
            finish(self.model)


class _Guard(AddressGuard):
    """Addresses of all chunks of a stage."""

    def __init__(self, model: nn.Module | Sequence[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
        self._chunks = nn.ModuleList(as_modules(model))
        super().__init__(self._chunks, tensors)

    def as_before(self, model: nn.Module | Sequence[nn.Module]) -> bool:
        return as_modules(model) == [*self._chunks] and super().as_before(self._chunks)
