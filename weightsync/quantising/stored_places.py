"""The places of a quantised checkpoint's tensors in live parameters."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightsync.errors import TransportError
from weightsync.memory.kernels.device_kernels import DigestTable
from weightsync.memory.kernels.digests import BoxPart, box_digests, box_table
from weightsync.memory.tensors import segment_view
from weightsync.plan import RankLayout, Segment, TensorMeta
from weightsync.plan.layout.formats import Format
from weightsync.protocol.handles import StoredExport
from weightsync.protocol.messages import Digests


class StoredPlaces:
    """The places of a quantised checkpoint's tensors in a rank's live parameters.

    Attributes:
        formats: formats of quantised tensors, by the weight's name.
        numbers: the index of each stored tensor's digest, by name.
        are_right: True if the engine's own loader has put an update's bytes in these places. None before the
            first update.
        num_elements: by live parameter, the number of elements in these places.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        live: Mapping[str, torch.Tensor],
        stored: Sequence[TensorMeta],
        formats: Mapping[str, Format],
    ) -> None:
        """
        Args:
            segments: places in `live`, in the live parameters' dtypes.
            live: the live parameters.
            stored: the whole stored tensors.
            formats: see above.
        """
        self.formats = formats
        self.are_right: bool | None = None
        self._stored = {meta.name: meta for meta in stored}
        self.numbers = {name: number for number, name in enumerate(self._stored)}
        self._held: defaultdict[str, list[tuple[Segment, torch.Tensor]]] = defaultdict(list)
        self.num_elements: Counter[str] = Counter()
        for segment in segments:
            self._held[segment.tensor].append((segment, segment_view(live[segment.buffer], segment)))
        # The matrices of a shared scale have the same place.
        places = ((each.buffer, each.byte_offset, each.box.extent, each.strides) for each in segments)
        for buffer, _, extent, _ in dict.fromkeys(places):
            self.num_elements[buffer] += math.prod(extent)
        self._live = {name: live[name] for name in self.num_elements}
        self._device = next((each.device for each in live.values()), None)
        self._table: DigestTable | None = None

    @classmethod
    def of(cls, export: StoredExport, memory: Mapping[str, torch.Tensor]) -> StoredPlaces:
        """Return another process's places in mapped `memory`: uint8, one dimension."""
        live = {name: memory[name].view(getattr(torch, dtype)) for name, dtype in export.dtypes.items()}
        return cls(export.layout.segments, live, export.layout.tensors, export.formats)

    def in_memory(self, live: Mapping[str, torch.Tensor]) -> StoredPlaces:
        """Return the same places in other memory. Returns `self` if the addresses of `live` are the same."""
        if all(live[name].data_ptr() == address for name, address in self.addresses().items()):
            return self
        segments = [segment for its in self._held.values() for segment, _ in its]
        return StoredPlaces(segments, live, [*self._stored.values()], self.formats)

    def export(self, formats: Mapping[str, Format]) -> StoredExport:
        """Export the places to a process that has mapped the live parameters.

        `formats` are the formats of incoming tensors.
        """
        held = [each for its in self._held.values() for each in its]
        dtypes = {segment.buffer: str(place.dtype).removeprefix("torch.") for segment, place in held}
        segments = tuple(segment for segment, _ in held)
        return StoredExport(RankLayout(tuple(self._stored.values()), segments), dtypes, formats)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole shape of a stored tensor."""
        return self._stored[name].shape

    def held(self, name: str) -> Sequence[tuple[Segment, torch.Tensor]]:
        """Return this rank's places of a stored tensor, with views. May be empty."""
        return self._held.get(name, ())

    def view(self, name: str, place: Segment) -> torch.Tensor:
        """View one of this rank's places of a stored tensor."""
        return next(view for segment, view in self.held(name) if segment == place)

    def addresses(self) -> dict[str, int]:
        """Return the address of each live parameter with stored tensors, by name."""
        return {name: each.data_ptr() for name, each in self._live.items()}

    def parts(self, name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, BoxPart]]:
        """Return this rank's places of a stored tensor, with the matching parts of `tensor`.

        Parts are in the dtype of the place. Empty if the rank holds nothing of the tensor.
        """
        number, shape = self.numbers[name], self.shape(name)
        return [
            (place, BoxPart(number, tensor[segment.box.slices()].to(place.dtype), shape, segment.box))
            for segment, place in self.held(name)
        ]

    def digests(self) -> Digests:
        """Digest each stored tensor in live parameters: uint64[len(numbers)]."""
        if not self._device or self._device.type == "cpu":
            return box_digests(_parts(self), len(self.numbers))
        with torch.cuda.device(self._device):
            self._table = self._table or box_table(_parts(self), len(self.numbers))
            self._table.launch(torch.cuda.current_stream())
            return self._table.result()

    def require(self, digests: Digests) -> Digests:
        """Raise TransportError if live memory differs from `digests`. Returns the live digests."""
        found = self.digests()
        if differ := _differing(self.numbers, found, digests):
            raise TransportError(f"{differ[0]} was written, and live memory holds other bytes")
        return found

    def differing(self, digests: Digests) -> list[str]:
        """Return the names of tensors whose live bytes differ from `digests`."""
        return _differing(self.numbers, self.digests(), digests)


def _parts(places: StoredPlaces) -> list[BoxPart]:
    return [
        BoxPart(number, place, places.shape(name), segment.box)
        for name, number in places.numbers.items()
        for segment, place in places.held(name)
    ]


def _differing(numbers: Mapping[str, int], found: Digests, digests: Digests) -> list[str]:
    wrong = set(np.flatnonzero(found != digests).tolist())
    return [name for name, number in numbers.items() if number in wrong] if wrong else []
