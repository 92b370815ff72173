"""Where a trainer rank's weights come from: by the type of its model. README.md explains how to add one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from weightsync.errors import ConfigError, nearest
from weightsync.plan import Plan
from weightsync.protocol.handles import BufferHandle, PushTicket
from weightsync.protocol.messages import Attached, Compared
from weightsync.sources.base import (
    ComparesReplicas,
    ExportsWeights,
    Models,
    ModelSource,
    Offloads,
    PushesWeights,
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
    "PushesWeights",
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
_INSTEAD = {
    "quantization": {_MODULE: "weightsync.sources.quantized_module:QuantizedModuleSource"},
    "merge": {
        _MODULE: "weightsync.sources.lora.merged_lora:MergedLoraSource",
        _ENGINE: "weightsync.sources.lora.merged_zero:MergedZeroSource",
    },
}
"""The source that takes another one's place, by the setting that wants it."""
_TAKES = {"quantization": "plain modules and FSDP2", "merge": "plain modules, FSDP2 and DeepSpeed's engine"}
"""What each of these settings is for, in words."""


def attach(
    source: Source, plan: Plan, trainer: int, send_buffer: BufferHandle | PushTicket | None
) -> Attached:
    """Attach `source` as trainer rank `trainer`, in the way that its holder offers."""
    if not isinstance(send_buffer, PushTicket):
        return source.attach(plan, trainer, send_buffer)
    assert isinstance(source, PushesWeights), "it was asked by can_push()"
    return source.attach_push(plan, trainer, send_buffer)


def compare(source: Source, rounds: Sequence[int]) -> Compared | None:
    """Have `source` digest what other ranks hold, too. None if it cannot, or if there are no `rounds`."""
    if rounds and isinstance(source, ComparesReplicas):
        return source.compare_replicas(rounds)
    return None


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
    if setting := next((name for name in _INSTEAD if settings[name]), ""):
        if found not in _INSTEAD[setting]:
            remedy = f"leave it out: it takes {_TAKES[setting]}"
            raise ConfigError(setting, type(model).__name__, remedy)
        given = settings.pop(setting)
        _require_alone(setting, settings)
        instead: ModelSource = resolve_name(_INSTEAD[setting][found])(model, given, exclude, frozen=frozen)
        return instead
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
