"""The tensors of an engine's own quantised checkpoint."""

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
"""Tensors that vLLM 0.24 loads, and later versions leave in the checkpoint."""

_NAMED_BY = {
    "awq": "modules_to_not_convert, such as [lm_head]",
    "gptq": "modules_in_block_to_quantize, such as [self_attn, mlp]",
}
"""Keys that list the quantised layers. Without them, vLLM finds these layers in the folder's files."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """The tensors of an engine's own checkpoint, none if that has full precision.

    Attributes:
        formats: the formats of quantised weights, by the name of the weight.
        tensors: all tensors, in the order of the full-precision checkpoint.
    """

    formats: Mapping[str, Format] = field(default_factory=dict)
    tensors: Sequence[TensorMeta] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, quantization: Quantization) -> StoredCheckpoint:
        """Return a full-precision checkpoint quantised by `quantization`.

        Raises ConfigError for a format that no engine takes, PlanError for a weight that does not fit.
        """
        formats = formats_of(checkpoint, quantization)
        return cls(formats, stored_tensors(checkpoint, formats)) if formats else cls()

    def described(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the full-precision checkpoint with the engine's conversions."""
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
    """Return a checkpoint's quantisation by the model's config. Raises ConfigError if it is unknown.

    An engine's own online quantisation loads full-precision tensors, so it does not count.
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
    """Raise ConfigError if an engine stores one of `weights` in another format than `formats`.

    Layers that are not found are left out.

    Args:
        engine: the engine's name, for the error.
        layers: the parameters that the engine's loader fills, by the paths of layers.
        packed: layers that combine several layers of a checkpoint, by the last parts of their names.
        weights: the weights of linear layers.
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
