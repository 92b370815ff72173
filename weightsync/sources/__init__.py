"""Where a trainer rank's weights come from: by the type of its model. README.md explains how to add one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pkgutil import resolve_name
from typing import Any

from weightsync.errors import ConfigError, nearest
from weightsync.plan import Plan
from weightsync.protocol.handles import Attached, BufferHandle, PushTicket
from weightsync.sources.base import ExportsWeights, ModelSource, Offloads, PushesWeights, Source
from weightsync.sources.selection import Names

__all__ = [
    "SOURCES",
    "ExportsWeights",
    "ModelSource",
    "Names",
    "Offloads",
    "PushesWeights",
    "Source",
    "attach",
    "make_source",
]

SOURCES = {
    "deepspeed.runtime.engine.DeepSpeedEngine": "weightsync.sources.deepspeed:DeepSpeedSource",
    "megatron.core.transformer.module.MegatronModule": "weightsync.sources.megatron:MegatronSource",
    "torch.nn.modules.module.Module": "weightsync.sources.module:ModuleSource",
}
"""The source of each type of model, ``module:Class``, imported on use. The nearest type counts."""


def attach(
    source: Source, plan: Plan, trainer: int, send_buffer: BufferHandle | PushTicket | None
) -> Attached:
    """Attach `source` as trainer rank `trainer`, in the way that its holder offers."""
    if not isinstance(send_buffer, PushTicket):
        return source.attach(plan, trainer, send_buffer)
    assert isinstance(source, PushesWeights), "it was asked by can_push()"
    return source.attach_push(plan, trainer, send_buffer)


def make_source(
    model: object,
    exclude: Collection[str] = (),
    *,
    names: Names | None = None,
    frozen: Collection[str] = (),
    offloads: bool = False,
    hf_config: object = None,
    quantization: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Import and make the source of `model`, or of a list of its chunks. Arguments are `TrainerShard`'s.

    Raises ConfigError if its type has no entry in `SOURCES`, or if another argument excludes `quantization`.
    """
    chunk = model[0] if isinstance(model, (list, tuple)) and model else model
    bases = [f"{each.__module__}.{each.__qualname__}" for each in type(chunk).__mro__]
    found = next((SOURCES[base] for base in bases if base in SOURCES), None)
    if found is None:
        remedy = f"set self.source, or give a model of a known type; {nearest(bases[0], SOURCES)}"
        raise ConfigError("self.model", bases[0], remedy)
    if quantization is not None:
        return _quantized(model, found, quantization, exclude, frozen, {"names": names, "offloads": offloads})
    source: ModelSource = resolve_name(found)(
        model, exclude, names=names, frozen=frozen, offloads=offloads, hf_config=hf_config
    )
    return source


def _quantized(
    model: Any,  # noqa: ANN401 - a framework's
    found: str,
    quantization: Mapping[str, Any],
    exclude: Collection[str],
    frozen: Collection[str],
    others: Mapping[str, object],
) -> ModelSource:
    if found != SOURCES["torch.nn.modules.module.Module"]:
        remedy = "leave it out: weights of this model are quantised on the engine"
        raise ConfigError("quantization", type(model).__name__, remedy)
    for name, given in others.items():
        if given:
            raise ConfigError(name, given, "leave it out: weights that are quantised here do not take it")
    from weightsync.sources.quantized_module import QuantizedModuleSource

    return QuantizedModuleSource(model, quantization, exclude, frozen=frozen)
