"""Finds the places of a quantised checkpoint's tensors, with a loader that writes there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from weightsync.engines.loading.live_digest import parameters_of, require_complete
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.reload_trace import trace_reload
from weightsync.engines.loading.whole_sink import Loader
from weightsync.errors import TransportError
from weightsync.memory.kernels.digests import DigestSums
from weightsync.plan import TensorMeta
from weightsync.plan.layout.formats import Format
from weightsync.quantising.stored_places import StoredPlaces

logger = logging.getLogger("weightsync.engines")


def find_places(
    model: torch.nn.Module,
    stored: Sequence[TensorMeta],
    formats: Mapping[str, Format],
    make_loader: Callable[[], Loader],
    device: torch.device,
    obstacle: str = "",
) -> StoredPlaces | None:
    """Find the places of `stored` by a reload that changes nothing. None, and a line in the log, if it fails.

    They stay right while the parameters stay where they are.

    Args:
        obstacle: why live bytes are known to be others; "" if they may be the same.
    """
    if device.type == "cpu":
        return None  # vLLM packs weights for it
    are_packed = all(form.packed for form in formats.values())
    if are_packed:
        obstacle = "packed values are put in another order for their kernels"
    if not obstacle:
        try:
            return trace_places(model, stored, formats, make_loader)
        except UnprovableError as error:
            obstacle = str(error)
    level = logging.INFO if are_packed else logging.WARNING  # others may become fast by a setting
    logger.log(level, "each update goes through the engine's loader, see docs/quantised.md: %s", obstacle)
    return None


def trace_places(
    model: torch.nn.Module,
    stored: Sequence[TensorMeta],
    formats: Mapping[str, Format],
    make_loader: Callable[[], Loader],
) -> StoredPlaces:
    """Find the places of `stored`, as `find_places` does. Raises UnprovableError if it fails."""
    live = complete_parameters(model)
    return StoredPlaces(trace_reload(model, live, stored, make_loader).segments, live, stored, formats)


def complete_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the live parameters. Raises UnprovableError if their bytes are not all that was loaded."""
    try:
        require_complete(model)
    except TransportError as error:
        raise UnprovableError(str(error)) from error
    return {name: each.detach() for name, each in parameters_of(model)}


class StoredLoader:
    """A `Loader` of a quantised checkpoint's tensors, which writes live parameters in place.

    The first update goes through the engine's own loader, and shows whether the places are right.
    """

    def __init__(self, places: StoredPlaces, make_loader: Callable[[], Loader]) -> None:
        """`make_loader` returns the engine's own. It is called for the first update."""
        self._places = places
        self._loader = None if places.are_right else make_loader()
        self._digests = DigestSums(len(places.numbers))
        self._came: set[str] = set()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors to their places, or hand them to the engine's loader. Raises RuntimeError."""
        named = list(weights)
        if twice := sorted(self._came.intersection(name for name, _ in named)):
            raise RuntimeError(f"{twice[0]} came twice")
        self._came.update(name for name, _ in named)
        placed = [each for name, tensor in named for each in self._places.parts(name, tensor)]
        self._digests.add([part for _, part in placed])
        if self._loader:
            self._loader.load(named)
            return
        with torch.no_grad():
            for place, part in placed:
                place.copy_(part.data)

    def finish(self) -> None:
        """Compare the live parameters with the loaded tensors.

        Raises RuntimeError if a tensor did not arrive, or differs.
        """
        if missing := sorted(self._places.numbers.keys() - self._came):
            raise RuntimeError(f"{missing[0]} did not come: {len(missing)} tensors are not whole")
        if self._loader:
            self._loader.finish()
        differ = self._places.differing(self._digests.result())
        if not self._loader and differ:
            raise RuntimeError(f"{differ[0]} was written, and live memory holds other bytes")
        self._places.are_right = not differ
        if differ:
            logger.warning("the loader stores %s otherwise than traced: it loads each update", differ[0])

    def abandon(self) -> None:
        """End the update early. Written bytes stay, and the next update writes all again."""
        if self._loader:
            self._loader.abandon()
