"""Launches that quantise a rank's reads of trainers' tensors, made once per plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch

from weightsync.memory.kernels.digests import BoxPart, box_table
from weightsync.memory.tensors import typed
from weightsync.plan import Plan, Segment
from weightsync.plan.direct.stored_reads import StoredRead, gathered
from weightsync.plan.direct.whole_sources import WholeSource
from weightsync.protocol.messages import HolderDigests
from weightsync.quantising.launch_graph import LaunchGraph
from weightsync.quantising.quantize_kernels import MatrixDigests, QuantizedMatrix, QuantizeTable
from weightsync.quantising.quantizing_tables import NoKernelError, require_kernel
from weightsync.quantising.shared_scale_table import SharedScaleTable, can_share_scale
from weightsync.quantising.stored_places import StoredPlaces

GROUP_NBYTES = 256 << 20
"""With half of this size, reading and quantising 8 GB took a tenth more time on an H200."""
NUM_SLOTS = 3
"""A group is quantised while the next two groups are gathered, on the same multiprocessors."""
_ALIGN = 256


class QuantizingReads:
    """Quantises reads in groups. Reads in group 0 are stored without conversion, and only digested.

    The other groups are gathered in scratch memory: group n in the slot of group n - `NUM_SLOTS`. Sources in
    `in_place` are read directly.

    Attributes:
        in_place: the sources of reads that are not gathered, by the name of the read's buffer.
        nbytes: size of the scratch memory.
        num_groups: number of groups.
        group_of: the group of a read, by the name of the read's buffer.
    """

    def __init__(
        self,
        plan: Plan,
        reads: Sequence[StoredRead],
        places: StoredPlaces,
        in_place: Mapping[str, WholeSource] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            reads: the rank's reads, see `stored_reads`.
            places: places of stored tensors in the rank's live parameters.
            in_place: the sources on this device, by buffer.
        """
        self._plan, self._reads, self._places = plan, reads, places
        quantised = {gathered(number) for number, each in enumerate(reads) if each.form}
        self.in_place = {name: each for name, each in in_place.items() if name in quantised}
        self._offset: dict[int, int] = {}
        self.group_of = {each.place.buffer: 0 for each in reads if not each.form}
        groups, used, slot_nbytes = int(bool(quantised)), 0, 0
        for numbers in _together(reads):
            sizes = [self._nbytes(number) for number in numbers]
            if used and used + sum(sizes) > GROUP_NBYTES:
                groups, used = groups + 1, 0
            for number, nbytes in zip(numbers, sizes, strict=True):
                self._offset[number], used = used, used + nbytes
                self.group_of[gathered(number)] = groups
            slot_nbytes = max(slot_nbytes, used)
        self.num_groups = groups + 1
        self._slot_nbytes = slot_nbytes
        self.nbytes = slot_nbytes * min(NUM_SLOTS, groups)
        self._graphs: Sequence[LaunchGraph] = ()
        self._shared: list[tuple[SharedScaleTable, list[list[int]]]] = []

    def bind(self, memory: torch.Tensor, sources: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Prepare launches that use `memory`, uint8[nbytes]. The caller keeps `memory` alive.

        `sources` has the memory of each source in `in_place`, from the first byte on: uint8, one dimension.
        Returns the addresses of the reads' target buffers, by name. Raises NoKernelError.
        """
        held = {
            number: self._view(number, memory, sources)
            for number, each in enumerate(self._reads)
            if each.form
        }
        with torch.cuda.device(memory.device):
            self._wholes, self._stored = (
                torch.zeros((2, num), dtype=torch.int64, device=memory.device)
                for num in (len(self._plan.tensors), len(self._places.numbers))
            )
        self._graphs = [LaunchGraph(self._digest()), *map(LaunchGraph, self._quantize(held))]
        found = {gathered(number): each.data_ptr() for number, each in held.items()}
        return found | self._places.addresses()

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Start anew, before the first group."""
        with torch.cuda.stream(stream):
            self._wholes.zero_()
            self._stored.zero_()

    def launch(self, group: int, stream: torch.cuda.Stream) -> None:
        """Start all launches for a gathered group on `stream`. The launches use the group's slot."""
        self._graphs[group].launch(stream)

    def result(self) -> HolderDigests:
        """Return the digests of the sources and results, after all launches have ended.

        A tensor that changed during the launches has a wrong digest.
        """
        wholes, stored = (each[0].cpu().numpy().view(np.uint64) for each in (self._wholes, self._stored))
        for table, tensors in self._shared:
            for group in table.changed():
                wholes[tensors[group]] += np.uint64(1)
        return HolderDigests(wholes, stored, are_parts=True)

    def _nbytes(self, number: int) -> int:
        """Return the bytes of memory in which a read is gathered."""
        read = self._reads[number]
        if gathered(number) in self.in_place:
            return 0
        nbytes = read.box.numel * self._plan.tensors[read.tensor].itemsize
        return -(-nbytes // _ALIGN) * _ALIGN

    def _view(self, number: int, memory: torch.Tensor, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """View the matrix of a read, gathered or in place."""
        read, name = self._reads[number], gathered(number)
        meta, slot = self._plan.tensors[read.tensor], (self.group_of[name] - 1) % NUM_SLOTS
        start = slot * self._slot_nbytes + self._offset[number]
        data = sources[name] if name in sources else memory[start:]
        return typed(data[: read.box.numel * meta.itemsize], meta, read.box).view(read.stored.extent)

    def _digest(self) -> Callable[[torch.cuda.Stream], None]:
        """Return the launches for reads that are stored without conversion."""
        wholes, stored = [], []
        for read in (each for each in self._reads if not each.form):
            place, meta = self._places.view(read.name, read.place), self._plan.tensors[read.tensor]
            outer = (None,) * (read.box.ndim - place.ndim)
            wholes.append(BoxPart(read.tensor, place[outer], meta.shape, read.box))
            shape, number = self._places.shape(read.name), self._places.numbers[read.name]
            stored.append(BoxPart(number, place, shape, read.stored))
        tables = [
            box_table(parts, totals.shape[1], totals)
            for parts, totals in ((wholes, self._wholes), (stored, self._stored))
        ]

        def launch(stream: torch.cuda.Stream) -> None:
            for table in tables:
                table.launch(stream)

        return launch

    def _quantize(self, held: Mapping[int, torch.Tensor]) -> list[Callable[[torch.cuda.Stream], None]]:
        """Return the launches per group. `held` has a matrix for each read's index."""
        groups: list[_Matrices] = [_Matrices() for _ in range(self.num_groups)]
        for number, data in held.items():
            read, its = self._reads[number], groups[self.group_of[gathered(number)]]
            matrix = self._matrix(read, data)
            if read.shares:
                its.sharing[read.shares].append((matrix, read.tensor))
            else:
                its.alone.append(matrix)
        return [self._launches(each) for each in groups[1:]]

    def _launches(self, its: _Matrices) -> Callable[[torch.cuda.Stream], None]:
        """Return a function that starts the kernels for a group."""
        digests = self._wholes[0], self._stored[0]
        tables: list[QuantizeTable | SharedScaleTable] = [QuantizeTable(its.alone, *digests)]
        if sharing := [*its.sharing.values()]:
            table = SharedScaleTable([[matrix for matrix, _ in group] for group in sharing], *digests)
            self._shared.append((table, [[tensor for _, tensor in group] for group in sharing]))
            tables.append(table)

        def launch(stream: torch.cuda.Stream) -> None:
            for table in tables:
                table.launch(stream)

        return launch

    def _matrix(self, read: StoredRead, matrix: torch.Tensor) -> QuantizedMatrix:
        form, scales, meta = read.form, read.scales, self._plan.tensors[read.tensor]
        assert form
        assert scales
        if not read.shares:
            require_kernel(meta, matrix, form)
        elif not can_share_scale(matrix, form):
            raise NoKernelError(f"{meta.name}: no kernel quantises {meta.dtype} to {form}")
        digests = MatrixDigests(
            read.tensor,
            meta.shape[-1],
            self._places.numbers[read.name],
            self._places.numbers[scales.tensor],
            row=_row(meta.shape, read.box.offset),
            stored_row=read.stored.offset[0],
            column=read.stored.offset[1],
        )
        first = read.stored.offset[0] - read.place.box.offset[0]
        values = self._rows(read.place, first, len(matrix))
        if read.shares:
            made = self._places.view(scales.tensor, scales)
        else:
            made = self._rows(scales, first // form.block[0], form.grid(matrix.shape)[0])
        return QuantizedMatrix.of(matrix, form, values, made, digests)

    def _rows(self, place: Segment, first: int, num_rows: int) -> torch.Tensor:
        return self._places.view(place.tensor, place)[first : first + num_rows]


@dataclass(slots=True)
class _Matrices:
    """The matrices of a group: with separate scales, and by place with a shared scale.

    Matrices with a shared scale come with the numbers of their tensors.
    """

    alone: list[QuantizedMatrix] = field(default_factory=list)
    sharing: defaultdict[tuple[str, int], list[tuple[QuantizedMatrix, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )


def _together(reads: Sequence[StoredRead]) -> Iterator[Sequence[int]]:
    """Yield the indices of reads that are quantised, together if the reads share a scale."""
    sharing = defaultdict[object, list[int]](list)
    for number, each in enumerate(reads):
        if each.form:
            sharing[each.shares or number].append(number)
    yield from sharing.values()


def _row(shape: Sequence[int], offset: Sequence[int]) -> int:
    """Return the index of the row with `offset` in a tensor, seen as a matrix."""
    sizes = (math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1))
    return sum(at * size for at, size in zip(offset, sizes, strict=False))
