"""The places of FP8 that vLLM makes of full-precision weights as it loads them, with a scale for each layer.

A rank's linear layer has a matrix in FP8, transposed, and one float32 scale for the whole matrix: for the
query, key and value projections together. Experts are in stacks, with two scales per expert: see
`online_places`. vLLM's loader reads full precision, and quantises. The place of each row is found by a reload
of the layers in their form before quantising. `online_proof` compares bytes with vLLM's, and the first update
does so again, since it uses vLLM's loader.

Sources: vLLM's ``layers/quantization/fp8.py``, ``layers/quantization/online/fp8.py`` and
``model_loader/reload/layerwise.py`` of 0.24 and 0.32.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.live_digest import parameters_of
from weightsync.engines.loading.reload_trace import trace_reload
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.online_places import ScaledMatrix, online_places
from weightsync.engines.quantised.quantizing_loader import QuantizingLoader, stored_tensors
from weightsync.engines.quantised.stored_checkpoint import StoredCheckpoint
from weightsync.engines.quantised.stored_loader import StoredLoader, complete_parameters
from weightsync.plan import Segment
from weightsync.plan.layout.formats import Format
from weightsync.quantising.stored_places import StoredPlaces

logger = logging.getLogger("weightsync.engines.vllm")

LAYER = Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0))
"""vLLM's format of a layer or an expert. A rank that keeps a part has a scale of that part."""

Loaded = Mapping[str, Mapping[str, torch.Tensor]]
"""The tensors that vLLM's loader fills and vLLM then quantises, by path of the layer and last name."""

_DONE = "_already_called_process_weights_after_loading"
"""The attribute that vLLM's methods add to a processed layer."""


def trace_online(
    model: torch.nn.Module, loaded: Loaded, checkpoint: Checkpoint, make_loader: Callable[[], Loader]
) -> tuple[StoredCheckpoint, StoredPlaces]:
    """Find the tensors of a full-precision checkpoint that vLLM quantises, and their places.

    No weights change.

    Args:
        loaded: the layers that vLLM quantises.
        make_loader: begins a reload of `model`.

    Raises:
        UnprovableError: vLLM's loader does more than copy, or a layer is made of unknown parts.
    """
    live = complete_parameters(model)
    whole = stored_tensors(checkpoint, {})
    with _before_it_quantises((model.get_submodule(path), its) for path, its in loaded.items()):
        before = {name: each.detach() for name, each in parameters_of(model)}
        reload = trace_reload(model, before, whole, make_loader)
    return online_places(reload.segments, checkpoint, live, partial(_owner, loaded))


def _owner(loaded: Loaded, segment: Segment) -> ScaledMatrix | None:
    """Return the layer or expert that has one scale for a segment. None if the segment is not quantised."""
    path, _, leaf = segment.buffer.rpartition(".")
    whole = loaded.get(path, {}).get(leaf)
    return None if whole is None else ScaledMatrix.at(segment, whole, whole.dtype, LAYER)


@contextmanager
def _before_it_quantises(layers: Iterable[tuple[Any, Mapping[str, torch.Tensor]]]) -> Iterator[None]:
    """Have layers hold tensors like those that are loaded, which vLLM does not process."""
    held = []
    try:
        for layer, loaded in layers:
            held.append((layer, dict(layer._parameters), layer.quant_method))
            for name, each in loaded.items():
                whole = torch.empty(each.shape, dtype=each.dtype, device="cpu")  # memory that nobody touches
                parameter = torch.nn.Parameter(whole, requires_grad=False)
                # Without vLLM's loader, a parameter would take experts of other ranks, too.
                vars(parameter).update(vars(layer._parameters[name]))
                layer._parameters[name] = parameter
                layer._parameters.pop(f"{name}_scale")
            method = copy.copy(layer.quant_method)
            method.process_weights_after_loading = _leave
            layer.quant_method = method
        yield
    finally:
        for layer, parameters, method in held:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer.quant_method = method


def _leave(layer: torch.nn.Module) -> None:
    """Stand in for a method of vLLM that processes a layer."""
    setattr(layer, _DONE, True)


def online_loader(
    formats: Mapping[str, Format], places: StoredPlaces | None, make_loader: Callable[[], Loader]
) -> Loader:
    """Return a loader of full-precision tensors for one update.

    Args:
        places: the places of quantised tensors in live parameters, None if they are not known.
        make_loader: returns vLLM's own loader, which quantises.
    """
    if places is None or places.are_right is False:
        return make_loader()
    if places.are_right:
        return QuantizingLoader(StoredLoader(places, make_loader), formats)
    return _FirstLoader(formats, places, make_loader())


class _FirstLoader:
    """The `Loader` of an update through vLLM's own. It shows whether the bytes are those made here."""

    def __init__(self, formats: Mapping[str, Format], places: StoredPlaces, own: Loader) -> None:
        self._own, self._places = own, places
        compared = QuantizingLoader(StoredLoader(places, lambda: _End(own)), formats)
        self._compared: Loader | None = compared

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give tensors to vLLM's loader, and digest their quantised form here."""
        named = list(weights)
        self._own.load(named)
        try:
            if self._compared:
                self._compared.load(named)
        except torch.OutOfMemoryError as error:
            # vLLM itself may have enough memory: it need not store both.
            self._compared, self._places.are_right = None, False
            logger.warning("vLLM quantises in each update, see docs/quantised.md: %s", error)

    def finish(self) -> None:
        """Make the tensors live, and compare. Raises RuntimeError if a tensor did not come."""
        (self._compared or self._own).finish()

    def abandon(self) -> None:
        """End the update early, see `Loader.abandon`."""
        (self._compared or self._own).abandon()


class _End:
    """A `Loader` that ends the update of another one, and loads nothing."""

    def __init__(self, loader: Loader) -> None:
        self.finish, self.abandon = loader.finish, loader.abandon

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Leave tensors to the other loader."""
