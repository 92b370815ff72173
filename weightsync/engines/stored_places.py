"""The places in live parameters of what a quantised checkpoint stores, and a loader that writes there."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from weightsync.engines.live_digest import parameters_of, require_complete
from weightsync.engines.loader_trace import UnprovableError
from weightsync.engines.reload_trace import trace_reload
from weightsync.engines.whole_sink import Loader
from weightsync.errors import TransportError
from weightsync.memory.digests import BoxPart, box_digests, box_table
from weightsync.memory.kernels import DigestTable
from weightsync.memory.tensors import segment_view
from weightsync.plan import Segment, TensorMeta
from weightsync.plan.formats import Format
from weightsync.protocol.messages import Digests

logger = logging.getLogger("weightsync.engines.stored_places")


class StoredPlaces:
    """Where a rank's live parameters hold each tensor of its quantised checkpoint.

    Attributes:
        formats: of what is quantised, by the name of its weight.
        are_right: whether the engine's own loader has put the bytes of an update where this says. None
            before the first update.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        live: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        formats: Mapping[str, Format],
    ) -> None:
        """
        Args:
            segments: places in `live`, in the dtype of each live parameter.
            shapes: the whole shape of each stored tensor, by name.
            formats: see above.
        """
        self.formats = formats
        self.are_right: bool | None = None
        self._shapes = dict(shapes)
        self._numbers = {name: number for number, name in enumerate(shapes)}
        self._parts: defaultdict[str, list[tuple[Segment, torch.Tensor]]] = defaultdict(list)
        for segment in segments:
            self._parts[segment.tensor].append((segment, segment_view(live[segment.buffer], segment)))
        self._device = next((each.device for each in live.values()), None)
        self._table: DigestTable | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of all stored tensors."""
        return frozenset(self._shapes)

    def parts(self, name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, BoxPart]]:
        """Return this rank's places of a stored tensor, each with the part of `tensor` that goes there.

        Parts are in the dtype of the place. There is none if the rank holds nothing of the tensor.
        """
        number, shape = self._numbers[name], self._shapes[name]
        return [
            (place, BoxPart(number, tensor[segment.box.slices()].to(place.dtype), shape, segment.box))
            for segment, place in self._parts.get(name, ())
        ]

    def digests(self) -> Digests:
        """Digest what the live parameters hold of each tensor: uint64[len(names)]."""
        if not self._device or self._device.type == "cpu":
            return box_digests(self._places(), len(self._numbers))
        with torch.cuda.device(self._device):
            self._table = self._table or box_table(self._places(), len(self._numbers))
            self._table.launch(torch.cuda.current_stream())
            return self._table.result()

    def _places(self) -> list[BoxPart]:
        return [
            BoxPart(self._numbers[name], place, self._shapes[name], segment.box)
            for name, held in self._parts.items()
            for segment, place in held
        ]

    def differing(self, digests: Digests) -> list[str]:
        """Return the names of tensors of which live memory holds other bytes than `digests` say."""
        found = self.digests()
        return [name for name, number in self._numbers.items() if found[number] != digests[number]]


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
    live = {name: each.detach() for name, each in parameters_of(model)}
    are_packed = all(form.packed for form in formats.values())
    if are_packed:
        obstacle = "packed values are put in another order for their kernels"
    if not obstacle:
        try:
            require_complete(model)
            segments = trace_reload(model, live, stored, make_loader)
        except (TransportError, UnprovableError) as error:
            obstacle = str(error)
        else:
            return StoredPlaces(segments, live, {meta.name: meta.shape for meta in stored}, formats)
    level = logging.INFO if are_packed else logging.WARNING  # others may become fast by a setting
    logger.log(level, "each update goes through the engine's loader, see docs/quantised.md: %s", obstacle)
    return None


class StoredLoader:
    """A `Loader` of what a quantised checkpoint stores, which writes live parameters in place.

    The first update goes through the engine's own loader, and shows whether the places are right.
    """

    def __init__(self, places: StoredPlaces, make_loader: Callable[[], Loader]) -> None:
        """`make_loader` returns the engine's own. It is called for the first update."""
        self._places = places
        self._loader = None if places.are_right else make_loader()
        self._digests = np.zeros(len(places.names), np.uint64)
        self._came: set[str] = set()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors to their places, or hand them to the engine's loader. Raises RuntimeError."""
        named = list(weights)
        if twice := sorted(self._came.intersection(name for name, _ in named)):
            raise RuntimeError(f"{twice[0]} came twice")
        self._came.update(name for name, _ in named)
        placed = [each for name, tensor in named for each in self._places.parts(name, tensor)]
        self._digests += box_digests([part for _, part in placed], len(self._digests))
        if self._loader:
            self._loader.load(named)
            return
        with torch.no_grad():
            for place, part in placed:
                place.copy_(part.data)

    def finish(self) -> None:
        """Compare what lives with what came. Raises RuntimeError if a tensor did not come, or differs."""
        if missing := sorted(self._places.names - self._came):
            raise RuntimeError(f"{missing[0]} did not come: {len(missing)} tensors are not whole")
        if self._loader:
            self._loader.finish()
        differ = self._places.differing(self._digests)
        if not self._loader and differ:
            raise RuntimeError(f"{differ[0]} was written, and live memory holds other bytes")
        self._places.are_right = not differ
        if differ:
            logger.warning("the loader stores %s otherwise than traced: it loads each update", differ[0])

    def abandon(self) -> None:
        """End the update early. What was written stays, and the next update writes all again."""
        if self._loader:
            self._loader.abandon()
