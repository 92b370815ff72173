"""Device memory of a rank as it travels, in columns."""

from __future__ import annotations

import itertools
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from weightsync.plan import RankLayout, Reads
from weightsync.plan.layout.column import PackedColumn
from weightsync.plan.layout.formats import Format
from weightsync.plan.layout.layout_table import LayoutTable, Outline, pack_names, unpack_names
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.handles import DeviceHandle, StoredExport

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Handles of n buffers in m allocations. An allocation holds many buffers, and has one IPC handle.

    Attributes:
        names: the buffers' names, as of `pack_names`.
        owners: device and process of allocations, each pair once.
        owner, ipc_nbytes: [m], an index into `owners`, and the size of the IPC handle.
        ipc: the IPC handles, one after the other.
        allocation: [n], the number of the buffer's allocation.
        offset, nbytes: [n], see `DeviceHandle`.
    """

    names: bytes
    owners: tuple[tuple[str, int], ...]
    owner: PackedColumn
    ipc_nbytes: PackedColumn
    ipc: bytes
    allocation: PackedColumn
    offset: PackedColumn
    nbytes: PackedColumn

    @classmethod
    def of_process(
        cls,
        device: str,
        pid: int,
        names: Iterable[str],
        places: Sequence[tuple[bytes, int]],
        nbytes: Iterable[int],
    ) -> DeviceMemory:
        """Make columns of buffers of one process on one GPU. `places`: their IPC handles and offsets."""
        numbers = {ipc: number for number, ipc in enumerate(dict.fromkeys(ipc for ipc, _ in places))}
        return cls(
            pack_names(names),
            ((device, pid),) if numbers else (),
            PackedColumn.of([0] * len(numbers)),
            PackedColumn.of(map(len, numbers)),
            b"".join(numbers),
            PackedColumn.of(numbers[ipc] for ipc, _ in places),
            PackedColumn.of(offset for _, offset in places),
            PackedColumn.of(nbytes),
        )

    @classmethod
    def of(cls, buffers: Mapping[str, DeviceHandle]) -> DeviceMemory:
        """Make columns of handles by name."""
        handles = buffers.values()
        places = [handle.allocation for handle in handles]
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        owners = {owner: number for number, owner in enumerate(dict.fromkeys(place[:2] for place in numbers))}
        return cls(
            pack_names(buffers),
            tuple(owners),
            PackedColumn.of(owners[place[:2]] for place in numbers),
            PackedColumn.of(len(ipc) for _, _, ipc in numbers),
            b"".join(ipc for _, _, ipc in numbers),
            PackedColumn.of(numbers[place] for place in places),
            PackedColumn.of(handle.offset for handle in handles),
            PackedColumn.of(handle.nbytes for handle in handles),
        )

    def allocations(self) -> list[tuple[str, int, bytes]]:
        """Return the allocations: device, process and IPC handle."""
        ends = itertools.accumulate(sizes := self.ipc_nbytes.tolist())
        return [
            (*self.owners[owner], self.ipc[end - size : end])
            for owner, size, end in zip(self.owner.tolist(), sizes, ends, strict=True)
        ]

    def known_by(self, names: dict[bytes, bytes]) -> DeviceMemory:
        """Return this memory with the equal names object in `names`. New names are added to `names`."""
        return replace(self, names=names.setdefault(self.names, self.names))

    def first(self) -> DeviceHandle:
        """Return the handle of the first buffer. There must be one."""
        allocation, offset, nbytes = (
            each.tolist()[0] for each in (self.allocation, self.offset, self.nbytes)
        )
        return DeviceHandle(*self.allocations()[allocation], offset, nbytes)

    def places(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, allocation number, offset in the allocation, and bytes of each buffer."""
        columns = (each.tolist() for each in (self.allocation, self.offset, self.nbytes))
        return zip(unpack_names(self.names), *columns, strict=True)

    def handles(self, wanted: Container[str] | None = None) -> dict[str, DeviceHandle]:
        """Return the handles by name, only of `wanted` buffers if given."""
        allocations = self.allocations()
        return {
            name: DeviceHandle(*allocations[number], offset, nbytes)
            for name, number, offset, nbytes in self.places()
            if wanted is None or name in wanted
        }


@dataclass(frozen=True, eq=False)
class Export:
    """Device memory of a rank that its holder may access. Per-tensor objects are created lazily.

    Attributes:
        table: the rank's layout.
        memory: the rank's buffers.
    """

    table: LayoutTable
    memory: DeviceMemory

    @cached_property
    @collector_paused
    def layout(self) -> RankLayout:
        """The rank's layout."""
        return self.table.rank_layout()


@dataclass(frozen=True, slots=True, eq=False)
class RankMemory:
    """The wire form of an `Export`, without the layout.

    Attributes:
        own: the rank's own part of the layout, see `LayoutTable.own`.
        memory: the rank's buffers.
    """

    own: Outline
    memory: DeviceMemory

    @property
    def device(self) -> str:
        """The rank's GPU."""
        return self.own.device

    def export(self, layout: LayoutTable | None) -> Export:
        """Return the export with the layout, which follows from `layout` of a rank with an equal layout."""
        assert layout
        return Export(layout.of_rank(self.own), self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTable:
    """A `StoredExport` in columns: the names of each dtype's parameters and of each format's weights."""

    layout: LayoutTable
    dtypes: tuple[tuple[str, bytes], ...]
    formats: tuple[tuple[Format, bytes], ...]

    @classmethod
    def of(cls, export: StoredExport) -> StoredTable:
        """Make columns."""
        return cls(LayoutTable.of(export.layout), _by_value(export.dtypes), _by_value(export.formats))

    @collector_paused
    def export(self) -> StoredExport:
        """Return the same with an object for each tensor and place."""
        return StoredExport(self.layout.rank_layout(), _by_name(self.dtypes), _by_name(self.formats))


@dataclass(frozen=True, slots=True, eq=False)
class LiveExport:
    """Live parameters of an engine rank that converts tensors, which the holder copies and writes.

    Attributes:
        kind: the kind of the parameters' `LiveDigest`.
        memory: the parameters.
        places: the places of stored tensors in the parameters. Once they are shown to be right, the holder
            may quantise into them. None if they are not known.
    """

    kind: str
    memory: DeviceMemory
    places: StoredExport | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LiveMemory:
    """A `LiveExport` in columns, as an engine rank sends it.

    Attributes:
        kind, places: as in the export.
        memory: the export's parameters.
        reads: for the driver, the boxes of the plan's tensors that the holder needs to quantise. None if the
            holder needs whole tensors. The holder finds the boxes itself, see `StoredExport.reads`.
        takes_parts: whether the holder may write the quantised `reads`: `places` were shown to be right.
    """

    kind: str
    memory: DeviceMemory
    places: StoredTable | None = None
    reads: LayoutTable | None = None
    takes_parts: bool = False

    @property
    def device(self) -> str:
        """The rank's GPU."""
        return self.memory.owners[0][0]

    def export(self, layout: LayoutTable | None) -> LiveExport:
        """Return the same with an object for each place, for the holder. Ignores `layout`."""
        return LiveExport(self.kind, self.memory, self.places.export() if self.places else None)


def read_handles(
    parts: Sequence[Reads], memory: Mapping[int, DeviceMemory]
) -> dict[tuple[int, str], DeviceHandle]:
    """Return the handles of all buffers that `parts` read, by trainer rank and name.

    `memory` has the memory of these trainers.
    """
    wanted: dict[int, set[str]] = {trainer: set() for trainer in sorted(memory)}
    for reads in parts:
        key = reads.trainer.astype(np.int64) * len(reads.src_names) + reads.src_buffer
        for number in np.unique(key).tolist():
            trainer, buffer = divmod(number, len(reads.src_names))
            wanted[trainer].add(reads.src_names[buffer])
    return {
        (trainer, name): handle
        for trainer, names in wanted.items()
        for name, handle in memory[trainer].handles(names).items()
    }


def _by_value(values: Mapping[str, T]) -> tuple[tuple[T, bytes], ...]:
    """Return the values without repeats, with their names as of `pack_names`."""
    names: dict[T, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return tuple((value, pack_names(its)) for value, its in names.items())


def _by_name(values: tuple[tuple[T, bytes], ...]) -> dict[str, T]:
    """Undo `_by_value`."""
    return {name: value for value, packed in values for name in unpack_names(packed)}
