"""Launches that quantise buckets into live parameters, made once per plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.memory.kernels.digests import BoxPart, box_table
from weightsync.memory.stacked_experts import as_loaded
from weightsync.memory.tensors import byte_strides, typed
from weightsync.plan import Box, Piece, Plan, TensorMeta
from weightsync.plan.broadcast.assembly import assemble
from weightsync.plan.layout.copies import BoxCopy, Copies, box_copies
from weightsync.plan.layout.formats import TOGETHER, Format
from weightsync.protocol.messages import HolderDigests
from weightsync.quantising.launch_graph import LaunchGraph
from weightsync.quantising.piece_memory import SlotPieces
from weightsync.quantising.quantize_kernels import MatrixDigests, QuantizedMatrix, QuantizeTable, can_quantize
from weightsync.quantising.stored_places import StoredPlaces

_ALIGN = 256


class NoKernelError(Exception):
    """No kernel writes a tensor as the engine stores it. The message names the tensor."""


@dataclass(slots=True)
class _Step:
    """The work for one bucket, after pieces of assembled tensors were copied out."""

    wholes: list[BoxPart] = field(default_factory=list)
    matrices: list[QuantizedMatrix] = field(default_factory=list)
    stored: list[BoxPart] = field(default_factory=list)
    copies: list[BoxCopy] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def write(self, part: BoxPart, place: torch.Tensor) -> None:
        """Copy a stored part to its place, and digest the source."""
        self.stored.append(part)
        self.copies.append(_copy(part.data, place))


class _Parts(NamedTuple):
    """The tensor's stored name, or the names of the tensor's experts. One format for all."""

    names: tuple[str, ...]
    form: Format | None
    in_rows: bool  # a kernel can write the matrix in place


class QuantizingTables:
    """The launches of an update: digest received pieces, quantise, digest the results, write them.

    A piece of whole rows of blocks is quantised in the slot. Other matrices, and stacks of experts, are first
    assembled from pieces, unless all rows are in order in a slot. If the place of a matrix is whole rows too,
    the kernel writes there. Otherwise the kernel writes to scratch memory.

    Attributes:
        nbytes: size of the memory in which an update assembles and quantises tensors.
        places: places of stored tensors in live parameters.
    """

    def __init__(
        self, plan: Plan, pieces: SlotPieces, places: StoredPlaces, formats: Mapping[str, Format]
    ) -> None:
        """
        Args:
            pieces: pieces on the device of the live parameters.
            formats: formats of quantised tensors, by the weight's name. Other tensors are not converted.

        Raises:
            NoKernelError: no kernel here writes a tensor as it is stored. `bind` finds further cases.
        """
        self.places = places
        self._plan, self._memory = plan, pieces
        metas, self._shapes = plan.tensors, {meta.name: meta.shape for meta in plan.tensors}
        self._parts = parts = [_parts_of(meta, self._shapes, formats, places) for meta in metas]
        self._pieces = [plan.bucket(index).pieces for index in range(plan.num_buckets)]
        every = [piece for its in self._pieces for piece in its]
        parted = {it.tensor for it in every if not _can_pass(it, metas[it.tensor], parts[it.tensor], places)}
        self._passing = {each.tensor for each in every} - parted
        self._together = [_whole_tensors(its, pieces, self._passing) for its in self._pieces]
        parted -= {tensor for wholes in self._together for tensor in wholes}
        self._assembly = assemble(plan, parted)
        self._taken = parted
        made = zip(self._together, self._assembly.complete, strict=True)
        scratch = [*map(_scratch_nbytes, metas, parts)]
        most = max((sum(scratch[each] for each in (*wholes, *done)) for wholes, done in made), default=0)
        self.nbytes = self._assembly.nbytes + most
        self._base = -1
        self._graphs: Sequence[LaunchGraph] = ()
        device = pieces.device
        with torch.cuda.device(device):
            self._wholes, self._stored = (
                torch.zeros((2, num), dtype=torch.int64, device=device)
                for num in (len(plan.tensors), len(places.numbers))
            )

    def bind(self, memory: torch.Tensor) -> None:
        """Prepare launches that use `memory`, uint8[nbytes], if they do not use it already.

        The caller keeps `memory` alive. Raises NoKernelError, see `QuantizingTables`.
        """
        if memory.data_ptr() == self._base:
            return
        steps = [self._step(bucket, memory) for bucket in range(self._plan.num_buckets)]
        if missing := sorted(set(self.places.numbers).difference(*(step.names for step in steps))):
            raise NoKernelError(f"{missing[0]} is made of no tensor of the plan")
        self._write = _copy_table([step.copies for step in steps])
        self._take = _copy_table([self._copies(bucket, memory) for bucket in range(self._plan.num_buckets)])
        self._graphs = [LaunchGraph(self._launches(bucket, step)) for bucket, step in enumerate(steps)]
        self._base = memory.data_ptr()

    def run(self, bucket: int, stream: torch.cuda.Stream) -> None:
        """Start all launches for a bucket on `stream`. The launches use the bucket's slot.

        Bucket 0 begins an update.
        """
        if bucket == 0:
            with torch.cuda.stream(stream):
                self._wholes.zero_()
                self._stored.zero_()
        self._graphs[bucket].launch(stream)

    def result(self) -> HolderDigests:
        """Return the digests of an update, after all launches have ended."""
        wholes, stored = (each[0].cpu().numpy().view(np.uint64) for each in (self._wholes, self._stored))
        return HolderDigests(wholes, stored)

    def _launches(self, bucket: int, step: _Step) -> Callable[[torch.cuda.Stream], None]:
        wholes = box_table(step.wholes, len(self._wholes[0]), self._wholes)
        stored = box_table(step.stored, len(self._stored[0]), self._stored)
        quantize = QuantizeTable(step.matrices, self._wholes[0], self._stored[0])

        def launch(stream: torch.cuda.Stream) -> None:
            self._take.launch(bucket, stream)
            wholes.launch(stream)
            quantize.launch(stream)
            stored.launch(stream)
            self._write.launch(bucket, stream)

        return launch

    def _step(self, bucket: int, memory: torch.Tensor) -> _Step:
        step, scratch = _Step(), _Scratch(memory[self._assembly.nbytes :])
        for piece in self._pieces[bucket]:
            if piece.tensor in self._passing:
                self._pass_on(step, piece)
        for tensor, whole in self._together[bucket].items():
            self._store(step, tensor, whole, scratch)
        for tensor in self._assembly.complete[bucket]:
            self._store(step, tensor, self._assembled(tensor, memory), scratch)
        return step

    def _assembled(self, tensor: int, memory: torch.Tensor) -> torch.Tensor:
        """View the memory in which a tensor is assembled."""
        meta, start = self._plan.tensors[tensor], self._assembly.offset[tensor]
        return typed(memory[start : start + meta.nbytes], meta, Box.whole(meta.shape))

    def _copies(self, bucket: int, memory: torch.Tensor) -> list[BoxCopy]:
        """Return the copies of a bucket's pieces to assembled tensors."""
        return [
            _copy(self._memory.view(piece), self._assembled(piece.tensor, memory)[piece.box.slices()])
            for piece in self._pieces[bucket]
            if piece.tensor in self._taken
        ]

    def _pass_on(self, step: _Step, piece: Piece) -> None:
        """Store or quantise a piece."""
        meta, form = self._plan.tensors[piece.tensor], self._parts[piece.tensor].form
        data = self._memory.view(piece)
        if form:
            self._quantize_in_place(step, piece.tensor, data, piece.box.offset[0])
            return
        step.wholes.append(BoxPart(piece.tensor, data, meta.shape, piece.box))
        step.names.add(meta.name)
        for segment, place in self.places.held(meta.name):
            _require_dtype(meta.name, data, place)
            if part := piece.box.intersect(segment.box):
                held = data[part.slices(piece.box)]
                number = self.places.numbers[meta.name]
                step.write(BoxPart(number, held, meta.shape, part), place[part.slices(segment.box)])

    def _store(self, step: _Step, tensor: int, whole: torch.Tensor, scratch: _Scratch) -> None:
        """Store a whole tensor, quantised if it has a format."""
        meta, form = self._plan.tensors[tensor], self._parts[tensor].form
        parts = as_loaded(meta.name, whole, self._shapes)
        if form is None:
            step.wholes.append(BoxPart.whole(tensor, whole))
            for name, part in parts:
                self._put(step, name, part)
            return
        matrix = whole.view(-1, whole.shape[-1])
        if self._parts[tensor].in_rows:
            self._quantize_in_place(step, tensor, matrix, 0)
            return
        require_kernel(meta, matrix, form)
        values = scratch.take(matrix.shape, getattr(torch, form.values))
        scales = scratch.take(form.grid(matrix.shape), torch.float32)
        digests = MatrixDigests(tensor, matrix.shape[1])
        step.matrices.append(QuantizedMatrix.of(matrix, form, values, scales, digests))
        for name, part in parts:
            first = (part.storage_offset() - whole.storage_offset()) // matrix.shape[1]
            end, block = first + len(part), form.block[0]
            if first % block or (end % block and end < len(matrix)):
                raise NoKernelError(f"{name}: a block of {block} rows would reach into the next expert")
            self._put(step, name, values[first:end])
            self._put(step, _scales_of(name, form), scales[first // block : -(-end // block)])

    def _put(self, step: _Step, name: str, data: torch.Tensor) -> None:
        """Write `data`, a whole stored tensor, to the tensor's places."""
        step.names.add(name)
        for _, place in self.places.held(name):
            _require_dtype(name, data, place)
        for place, part in self.places.parts(name, data):
            step.write(part, place)

    def _quantize_in_place(self, step: _Step, tensor: int, data: torch.Tensor, first: int) -> None:
        """Quantise a matrix's rows from `first` on into this rank's place, if the rank holds any of them."""
        meta, form = self._plan.tensors[tensor], self._parts[tensor].form
        assert form
        require_kernel(meta, data, form)
        names, block = _names(meta, form), form.block[0]
        step.names.update(names)
        box = Box((first, 0), tuple(data.shape))
        if not self.places.held(meta.name):
            step.wholes.append(BoxPart(tensor, data, meta.shape, box))
            return
        ((values, place),), ((_, scales_place),) = map(self.places.held, names)
        part = box.intersect(values.box)
        for rest in _rows_besides(box, part):
            step.wholes.append(BoxPart(tensor, data[rest.slices(box)], meta.shape, rest))
        if part is None:
            return
        start, num_rows = part.offset[0] - values.box.offset[0], part.extent[0]
        into = place[start : start + num_rows]
        scales_into = scales_place[start // block :][: form.grid(part.extent)[0]]
        values_number, scales_number = (self.places.numbers[name] for name in names)
        digests = MatrixDigests(
            tensor, meta.shape[1], values_number, scales_number, part.offset[0], part.offset[0]
        )
        matrix = data[part.slices(box)]
        step.matrices.append(QuantizedMatrix.of(matrix, form, into, scales_into, digests))


def _parts_of(
    meta: TensorMeta,
    shapes: Mapping[str, tuple[int, ...]],
    formats: Mapping[str, Format],
    places: StoredPlaces,
) -> _Parts:
    """Return the stored names of a tensor. Raises NoKernelError if no kernel writes the tensor."""
    whole = torch.empty(meta.shape, device="meta")
    names = tuple(name for name, _ in as_loaded(meta.name, whole, shapes))
    found = {formats.get(name) for name in names}
    if len(found) > 1:
        raise NoKernelError(f"experts of {meta.name} are stored in different formats")
    form = found.pop()
    if form and form.rule in TOGETHER:  # before memory is allocated for the tensor
        raise NoKernelError(f"{meta.name}: no kernel quantises it to {form}")
    return _Parts(names, form, _fits_in_rows(meta, names, form, places))


def _fits_in_rows(meta: TensorMeta, names: Sequence[str], form: Format | None, places: StoredPlaces) -> bool:
    """Return True if a kernel can write a matrix in place: it has one place of whole rows."""
    if form is None or names != (meta.name,):
        return False
    held = [places.held(name) for name in _names(meta, form)]
    if any(len(each) != 1 for each in held):
        return False
    ((values, place),), ((scales, scales_place),) = held
    if not _is_rows_of_blocks(values.box, meta, form):
        return False
    scales_box = Box((values.box.offset[0] // form.block[0], 0), form.grid(values.box.extent))
    dtypes = getattr(torch, form.values), torch.float32
    return (
        scales.box == scales_box
        and (place.dtype, scales_place.dtype) == dtypes
        and place.is_contiguous()
        and scales_place.is_contiguous()
    )


def _can_pass(piece: Piece, meta: TensorMeta, parts: _Parts, places: StoredPlaces) -> bool:
    """Return True if a piece can be stored or quantised without the tensor's other pieces."""
    names, form, in_rows = parts
    if form is None or names != (meta.name,):
        return form is None and names == (meta.name,)
    is_elsewhere = not any(places.held(name) for name in _names(meta, form))
    return is_elsewhere or (in_rows and _is_rows_of_blocks(piece.box, meta, form))


def _whole_tensors(
    pieces: Sequence[Piece], memory: SlotPieces, passing: Collection[int]
) -> dict[int, torch.Tensor]:
    """Return the tensors that are whole in a bucket, row after row."""
    held = defaultdict[int, list[Piece]](list)
    for piece in pieces:
        held[piece.tensor].append(piece)
    found = {tensor: memory.whole(its) for tensor, its in held.items() if tensor not in passing}
    return {tensor: whole for tensor, whole in found.items() if whole is not None}


def _scratch_nbytes(meta: TensorMeta, parts: _Parts) -> int:
    """Return the bytes of scratch memory for a tensor, if it is quantised there."""
    if parts.form is None or parts.in_rows:
        return 0
    rows, columns = meta.numel // meta.shape[-1], meta.shape[-1]
    down, across = parts.form.grid((rows, columns))
    return _aligned(rows * columns) + _aligned(4 * down * across)


class _Scratch:
    """Memory that is allocated in order."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._next = memory, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next contiguous tensor of a shape and dtype."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        found = self._memory[self._next : self._next + nbytes].view(dtype).view(*shape)
        self._next += _aligned(nbytes)
        return found


def _names(meta: TensorMeta, form: Format) -> tuple[str, str]:
    """Return the names of a matrix's values and scales."""
    return meta.name, _scales_of(meta.name, form)


def _scales_of(name: str, form: Format) -> str:
    return name.removesuffix("weight") + form.scale_suffix


def _is_rows_of_blocks(box: Box, meta: TensorMeta, form: Format) -> bool:
    """Return True if a box of a matrix is whole rows and cuts no block."""
    first, block = box.offset[0], form.block[0]
    end = first + box.extent[0]
    is_cut = not block or first % block or (end % block and end < meta.shape[0])
    return box.extent[1:] == meta.shape[1:] and not is_cut


def _rows_besides(box: Box, part: Box | None) -> list[Box]:
    """Return the rows of `box` before and after those of `part`."""
    if part is None:
        return [box]
    first, column = box.offset
    bounds = (first, part.offset[0]), (part.offset[0] + part.extent[0], first + box.extent[0])
    return [Box((start, column), (end - start, box.extent[1])) for start, end in bounds if start < end]


def require_kernel(meta: TensorMeta, matrix: torch.Tensor, form: Format) -> None:
    """Raise NoKernelError unless a kernel quantises `matrix`, a part of a tensor, to `form`."""
    if not can_quantize(matrix, form):
        raise NoKernelError(f"{meta.name}: no kernel quantises {meta.dtype} to {form}")


def _require_dtype(name: str, data: torch.Tensor, place: torch.Tensor) -> None:
    if data.dtype != place.dtype:
        raise NoKernelError(f"{name}: it is cast to another dtype")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _copy(source: torch.Tensor, target: torch.Tensor) -> BoxCopy:
    return (
        tuple(source.shape),
        source.element_size(),
        source.data_ptr(),
        byte_strides(source),
        target.data_ptr(),
        byte_strides(target),
    )


def _copy_table(copies: Sequence[Sequence[BoxCopy]]) -> CopyTable:
    """Return a table of the copies of each bucket."""
    table, parent = box_copies([copy for its in copies for copy in its])
    bounds = np.cumsum([0, *map(len, copies)])
    return CopyTable(Copies(*table.T), np.searchsorted(parent, bounds).tolist())
