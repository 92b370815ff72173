"""What an engine's own quantised checkpoint has in place of the full-precision one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightsync.engines.loading.checkpoint import FULL, Checkpoint
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.quantizing_loader import (
    QuantizingLoader,
    formats_of,
    stored_tensors,
    summary,
)
from weightsync.engines.quantised.stored_loader import StoredLoader
from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta
from weightsync.plan.layout.formats import FIELD, Format, Quantization
from weightsync.quantising.stored_places import StoredPlaces

_MAY_BE_LEFT = {"g_idx"}
"""What vLLM 0.24 loads of each layer, and later ones leave in the checkpoint."""

_NAMED_BY = {
    "awq": "modules_to_not_convert, such as [lm_head]",
    "gptq": "modules_in_block_to_quantize, such as [self_attn, mlp]",
}
"""Keys without which vLLM takes from the files in its folder which layers are quantised."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """The tensors of an engine's own checkpoint. Empty, if it is the full-precision one.

    Attributes:
        formats: of what it has quantised, by the name of the weight.
        tensors: all that it has, in the order of the full-precision checkpoint.
    """

    formats: Mapping[str, Format] = field(default_factory=dict)
    tensors: Sequence[TensorMeta] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, quantization: Quantization) -> StoredCheckpoint:
        """Return what `quantization` makes of a full-precision checkpoint.

        Raises ConfigError for a format that no engine takes, PlanError for a weight that does not fit.
        """
        formats = formats_of(checkpoint, quantization)
        return cls(formats, stored_tensors(checkpoint, formats)) if formats else cls()

    def described(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the full-precision checkpoint with what the engine makes of it."""
        return replace(checkpoint, converts=summary(self.formats), stored=tuple(self.tensors))

    def loader(
        self, places: StoredPlaces | None, make_loader: Callable[[], Loader], takes_stored: bool
    ) -> Loader:
        """Return a loader for one update.

        Args:
            places: where live parameters hold the tensors. None if that is not known.
            make_loader: returns the engine's own.
            takes_stored: tensors of this checkpoint come, and not full-precision ones.
        """
        loader: Loader
        if places is None or places.are_right is False:
            loader = make_loader()
        else:
            loader = StoredLoader(places, make_loader)
        return loader if takes_stored or not self.formats else QuantizingLoader(loader, self.formats)


def quantization_of(hf_config: object) -> Quantization:
    """Return how a model's checkpoint is quantised, by its config. Raises ConfigError if that is not known.

    An engine's own online quantisation takes full-precision tensors, so it is none.
    """
    given: Any = getattr(hf_config, FIELD, None)
    if not given:
        return Quantization()
    return Quantization.read(given if isinstance(given, Mapping) else given.to_dict())


def require_stored(
    engine: str,
    layers: Mapping[str, Mapping[str, torch.Tensor]],
    packed: Mapping[str, Sequence[str]],
    weights: Iterable[str],
    formats: Mapping[str, Format],
) -> None:
    """Raise ConfigError if an engine stores one of `weights` otherwise than `formats` says.

    Layers that are not found are left out.

    Args:
        engine: its name, for the error.
        layers: the parameters that its own loader fills, by the paths of layers.
        packed: layers that are one for several of a checkpoint, by the last parts of their names.
        weights: those of linear layers.
    """
    for name in sorted(weights):
        path = name.removesuffix(".weight")
        parent, _, last = path.rpartition(".")
        holders = [last, *(whole for whole, parts in packed.items() if last in parts)]
        paths = (f"{parent}.{each}" if parent else each for each in holders)
        has = next((layers[each] for each in paths if each in layers), {})
        form = formats.get(name)
        wanted = {"weight"} if form is None else {*form.suffixes} - _MAY_BE_LEFT
        is_whole = form is not None or "weight" not in has or has["weight"].dtype in FULL
        if has and not (wanted <= has.keys() and is_whole):
            found = ", ".join(f"{key} ({_dtype(each)})" for key, each in sorted(has.items()))
            how = f"name {path} in its targets, or as ignored, as {engine} reads them"
            if form is not None and form.rule in _NAMED_BY and "weight" in has:
                how = f"give {_NAMED_BY[form.rule]}, or start it from a folder with a checkpoint like it"
            remedy = f"{engine}'s layer has {found}: {how}"
            raise ConfigError(f"{FIELD} of {name}", str(form or "not quantised"), remedy)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
