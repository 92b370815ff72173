"""Where a trainer rank's weights come from: by the type of its model. README.md explains how to add one."""

from __future__ import annotations

from collections.abc import Collection
from pkgutil import resolve_name

from weightsync.errors import ConfigError, nearest
from weightsync.sources.base import ExportsWeights, ModelSource, Offloads, Source
from weightsync.sources.selection import Names

__all__ = ["SOURCES", "ExportsWeights", "ModelSource", "Names", "Offloads", "Source", "make_source"]

SOURCES = {
    "deepspeed.runtime.engine.DeepSpeedEngine": "weightsync.sources.deepspeed:DeepSpeedSource",
    "megatron.core.transformer.module.MegatronModule": "weightsync.sources.megatron:MegatronSource",
    "torch.nn.modules.module.Module": "weightsync.sources.module:ModuleSource",
}
"""The source of each type of model, ``module:Class``, imported on use. The nearest type counts."""


def make_source(
    model: object,
    exclude: Collection[str] = (),
    *,
    names: Names | None = None,
    frozen: Collection[str] = (),
    offloads: bool = False,
    hf_config: object = None,
) -> ModelSource:
    """Import and make the source of `model`, or of a list of its chunks.

    Raises ConfigError if its type has no entry in `SOURCES`.
    """
    chunk = model[0] if isinstance(model, (list, tuple)) and model else model
    bases = [f"{each.__module__}.{each.__qualname__}" for each in type(chunk).__mro__]
    found = next((SOURCES[base] for base in bases if base in SOURCES), None)
    if found is None:
        remedy = f"set self.source, or give a model of a known type; {nearest(bases[0], SOURCES)}"
        raise ConfigError("self.model", bases[0], remedy)
    source: ModelSource = resolve_name(found)(
        model, exclude, names=names, frozen=frozen, offloads=offloads, hf_config=hf_config
    )
    return source
