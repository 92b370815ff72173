"""Where a trainer rank's weights come from: by the type of its model. README.md explains how to add one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from weightsync.errors import ConfigError, nearest
from weightsync.protocol.messages import Compared, Sample
from weightsync.sources.base import (
    ComparesReplicas,
    ExportsWeights,
    MeasuresDensity,
    Models,
    ModelSource,
    Offloads,
    Source,
)
from weightsync.sources.selection import Names

__all__ = [
    "SOURCES",
    "ComparesReplicas",
    "ExportsWeights",
    "ModelSource",
    "Models",
    "Names",
    "Offloads",
    "Source",
    "attach",
    "compare",
    "make_components",
    "make_source",
]

SOURCES = {
    "deepspeed.runtime.engine.DeepSpeedEngine": "weightsync.sources.zero.deepspeed:DeepSpeedSource",
    "megatron.core.transformer.module.MegatronModule": "weightsync.sources.megatron:MegatronSource",
    "torch.nn.modules.module.Module": "weightsync.sources.module:ModuleSource",
}
"""The source of each type of model, ``module:Class``, imported on use. The nearest type counts."""
_MODULE = SOURCES["torch.nn.modules.module.Module"]
_ENGINE = SOURCES["deepspeed.runtime.engine.DeepSpeedEngine"]


@dataclass(frozen=True)
class _Setting:
    """A setting of `TrainerShard` that adds a `Transform` to a source.

    Attributes:
        transform: the class, ``module:Class``, which is made with the setting's value.
        when: the argument of `TensorSource` that takes the transform.
        sources: the sources that take the transform.
        takes: these sources, in words.
    """

    transform: str
    when: str
    sources: tuple[str, ...]
    takes: str


_TRANSFORMS = {
    "quantization": _Setting(
        "weightsync.sources.quantized:Quantized", "after", (_MODULE,), "plain modules and FSDP2"
    ),
    "merge": _Setting(
        "weightsync.sources.lora.merged:Merged",
        "before",
        (_MODULE, _ENGINE),
        "plain modules, FSDP2 and DeepSpeed's engine",
    ),
}


def compare(source: Source, rounds: Sequence[int]) -> Compared | None:
    """Have `source` digest what other ranks hold, too. None if it cannot."""
    return source.compare_replicas(rounds) if isinstance(source, ComparesReplicas) else None


def changed(source: Source) -> Mapping[str, Sample]:
    """Have `source` sample what changed, see `PublishReport.changed`. Empty if it cannot."""
    return source.changed() if isinstance(source, MeasuresDensity) else {}


def make_source(
    model: Any,  # noqa: ANN401 - a framework's
    exclude: Collection[str] = (),
    *,
    names: Names | None = None,
    frozen: Collection[str] = (),
    offloads: bool = False,
    hf_config: object = None,
    quantization: Mapping[str, Any] | None = None,
    merge: str = "",
) -> ModelSource:
    """Import and make the source of `model`, or of a list of its chunks. Arguments are `TrainerShard`'s.

    Raises ConfigError if its type has no entry in `SOURCES`, or if another argument excludes `quantization`
    or `merge`.
    """
    chunk = model[0] if isinstance(model, (list, tuple)) and model else model
    bases = [f"{each.__module__}.{each.__qualname__}" for each in type(chunk).__mro__]
    found = next((SOURCES[base] for base in bases if base in SOURCES), None)
    if found is None:
        remedy = f"set self.source, or give a model of a known type; {nearest(bases[0], SOURCES)}"
        raise ConfigError("self.model", bases[0], remedy)
    settings = {"quantization": quantization, "merge": merge, "names": names, "offloads": offloads}
    if name := next((each for each in _TRANSFORMS if settings[each]), ""):
        given, setting = settings.pop(name), _TRANSFORMS[name]
        if found not in setting.sources:
            raise ConfigError(name, type(model).__name__, f"leave it out: it takes {setting.takes}")
        _require_alone(name, settings)
        transforms = {setting.when: [resolve_name(setting.transform)(given)]}
        transformed: ModelSource = resolve_name(found)(model, exclude, frozen=frozen, **transforms)
        return transformed
    source: ModelSource = resolve_name(found)(
        model, exclude, names=names, frozen=frozen, offloads=offloads, hf_config=hf_config
    )
    return source


def make_components(models: Models, exclude: Collection[str] = (), **settings: Any) -> ModelSource:  # noqa: ANN401
    """Make the source of a model and a draft, of which one may be None. Arguments are those of `make_source`.

    Raises as `make_source`.
    """
    from weightsync.sources.components import ComponentsSource

    return ComponentsSource(models, make_source, exclude, **settings)


def _require_alone(setting: str, others: Mapping[str, object]) -> None:
    """Raise ConfigError if one of `others` is given beside `setting`."""
    for name, given in others.items():
        if given:
            raise ConfigError(name, given, f"leave it out: it cannot be given with {setting}")
