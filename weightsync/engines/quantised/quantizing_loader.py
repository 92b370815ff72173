"""Quantises a trainer's weights on the engine's device, in the format of the engine's own checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.whole_sink import Loader
from weightsync.errors import ConfigError
from weightsync.memory.stacked_experts import as_loaded
from weightsync.plan import TensorMeta
from weightsync.plan.layout.formats import FIELD, Format, Quantization, unproven
from weightsync.quantising.quantize import quantize, quantize_together


def formats_of(checkpoint: Checkpoint, quantization: Quantization) -> dict[str, Format]:
    """Return the weights' formats in `quantization`, by name, experts one by one.

    Raises:
        ConfigError: no engine has been shown to take a format.
        PlanError: a weight does not fit its format.
    """
    found = {}
    for whole, meta in _handed_over(checkpoint):
        is_expert = meta.name != whole
        form = quantization.of(meta.name) if is_expert or whole in checkpoint.linears else None
        if form is not None:
            if why := unproven(meta.name, form):
                raise ConfigError(f"{FIELD} of {meta.name}", str(form), f"another format: {why}")
            form.stored(meta)
            found[meta.name] = form
    return found


def stored_tensors(checkpoint: Checkpoint, formats: Mapping[str, Format]) -> list[TensorMeta]:
    """Return the tensors that a `QuantizingLoader` passes on for a whole checkpoint, in that order."""
    stored: list[TensorMeta] = []
    for _, meta in _handed_over(checkpoint):
        form = formats.get(meta.name)
        stored += [meta] if form is None else form.stored(meta)
    return stored


def _handed_over(checkpoint: Checkpoint) -> Iterator[tuple[str, TensorMeta]]:
    """Yield each tensor's name, and the results of `as_loaded` for the tensor."""
    shapes = {meta.name: meta.shape for meta in checkpoint.tensors}
    for meta in checkpoint.tensors:
        whole = torch.empty(meta.shape, device="meta")
        for name, part in as_loaded(meta.name, whole, shapes):
            yield meta.name, TensorMeta(name, meta.dtype, tuple(part.shape))


def summary(formats: Mapping[str, Format]) -> str:
    """Summarise the formats, such as ``28 become int4 with a scale for 1 x 32``; "" without formats."""
    counts = Counter(map(str, formats.values()))
    return ", ".join(f"{count} become {form}" for form, count in counts.items())


class QuantizingLoader:
    """A `Loader` that quantises, and passes tensors in the checkpoint's form to the engine's loader."""

    def __init__(self, loader: Loader, formats: Mapping[str, Format]) -> None:
        self._loader, self._formats = loader, formats
        # Matrices that share scales with others which did not come yet, by the names of all of them.
        self._waiting: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Quantise tensors that have a format, and pass all tensors on."""
        self._loader.load(self._stored(weights))

    def finish(self) -> None:
        """Make the tensors live, see `Loader.finish`. Raises RuntimeError if a tensor did not come."""
        for names, came in self._waiting.items():
            missing = next(name for name in names if name not in came)
            raise RuntimeError(f"{missing} did not come, which shares scales with {next(iter(came))}")
        self._loader.finish()

    def abandon(self) -> None:
        """End the update early, see `Loader.abandon`."""
        self._waiting.clear()
        self._loader.abandon()

    def _stored(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            form = self._formats.get(name)
            if form is None:
                yield name, tensor
            elif form.together:
                yield from self._stored_together(name, tensor, form.sharing(name))
            else:
                yield from _named(name, quantize(tensor, form))

    def _stored_together(
        self, name: str, tensor: torch.Tensor, names: tuple[str, ...]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stored tensors of the matrices `names`, which share scales, once all arrived."""
        came = self._waiting.setdefault(names, {})
        if name in came:
            raise RuntimeError(f"{name} came twice")
        came[name] = tensor
        if len(came) == len(names):
            del self._waiting[names]
            made = quantize_together([came[each] for each in names], [self._formats[each] for each in names])
            for each, stored in zip(names, made, strict=True):
                yield from _named(each, stored)


def _named(name: str, stored: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the stored tensors of a weight under full names."""
    for last, tensor in stored:
        yield name.removesuffix("weight") + last, tensor
