"""Quantises buckets into live parameters in place, by tables that are made once for each plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.channel.sink import PieceView
from weightsync.engines.live_digest import LiveParameters
from weightsync.engines.stored_places import StoredPlaces
from weightsync.engines.whole_sink import as_loaded
from weightsync.errors import TransportError
from weightsync.memory.bucket_copies import bucket_rows
from weightsync.memory.digests import BoxPart, box_table
from weightsync.memory.kernels import CopyTable, DigestTable
from weightsync.memory.quantize_kernels import QuantizeLaunch, can_quantize
from weightsync.memory.tensors import byte_strides
from weightsync.plan import Plan, Segment, TensorMeta
from weightsync.plan.assembly import assemble
from weightsync.plan.copies import BoxCopy, Copies, box_copies
from weightsync.plan.formats import Format
from weightsync.protocol.messages import Digests, LiveDigest

_ALIGN = 256


class NoKernelError(Exception):
    """There is no kernel for what an engine stores. The message names the tensor."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What follows the copies of a bucket, for the tensors that it completes and what is stored of them."""

    wholes: DigestTable
    launches: Sequence[QuantizeLaunch]
    stored: DigestTable


class QuantizingTables:
    """The launches of an update: assemble whole tensors, digest, quantise, digest what is stored, write it.

    Attributes:
        nbytes: of the memory in which tensors are assembled and quantised during an update.
        places: where what is stored lives.
    """

    def __init__(
        self, plan: Plan, slots: Sequence[torch.Tensor], places: StoredPlaces, formats: Mapping[str, Format]
    ) -> None:
        """
        Args:
            slots: the bucket slots, uint8, on the device of the live parameters.
            formats: of what is quantised, by the name of its weight. All else is stored as it comes.

        Raises:
            NoKernelError: a tensor is stored in a way that no kernel here writes.
        """
        self.places = places
        self._plan, self._formats = plan, formats
        self._slots = [slot.data_ptr() for slot in slots]
        self._shapes = {meta.name: meta.shape for meta in plan.tensors}
        self._assembly = assemble(plan)
        self.nbytes = self._assembly.nbytes + max(
            map(self._stored_nbytes, self._assembly.complete), default=0
        )
        self._base = 0
        self.steps: Sequence[_Step] = ()
        with torch.cuda.device(slots[0].device):
            self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.bind(torch.empty(self.nbytes, dtype=torch.uint8, device=slots[0].device))

    def bind(self, memory: torch.Tensor) -> None:
        """Prepare launches that use `memory`, uint8[nbytes], unless they use it already."""
        if memory.data_ptr() == self._base:
            return
        steps, copies, bounds, names = [], list[BoxCopy](), [0], set[str]()
        for tensors in self._assembly.complete:
            wholes = {tensor: self._whole(memory, tensor) for tensor in tensors}
            scratch = _Scratch(memory[self._assembly.nbytes :])
            launches: list[QuantizeLaunch] = []
            stored = [
                each
                for tensor, whole in wholes.items()
                for each in self._store(self._plan.tensors[tensor], whole, scratch, launches)
            ]
            names.update(name for name, _ in stored)
            placed = [each for name, data in stored for each in self._placed(name, data)]
            copies += [_copy(part.data, place) for place, part in placed]
            bounds.append(len(copies))
            digested = [BoxPart.whole(tensor, whole) for tensor, whole in wholes.items()]
            parts = [part for _, part in placed]
            steps.append(
                _Step(
                    box_table(digested, len(self._plan.tensors)),
                    launches,
                    box_table(parts, len(self.places.names)),
                )
            )
        if missing := sorted(self.places.names - names):
            raise NoKernelError(f"{missing[0]} is made of no tensor of the plan")
        for launch in {each.kernel: each for step in steps for each in step.launches}.values():
            launch.load()
        table, parent = box_copies(copies)
        self._write = CopyTable(Copies(*table.T), np.searchsorted(parent, bounds).tolist())
        self._take = CopyTable(*self._rows(memory.data_ptr()))
        self.steps, self._base = steps, memory.data_ptr()

    def run(self, bucket: int) -> None:
        """Start all launches for a bucket in its slot, and wait until the slot may be filled again."""
        stream, step = self._stream, self.steps[bucket]
        self._take.launch(bucket, stream)
        taken = stream.record_event()
        step.wholes.launch(stream)
        for launch in step.launches:
            launch.launch(stream)
        step.stored.launch(stream)
        self._write.launch(bucket, stream)
        taken.synchronize()

    def wait(self) -> None:
        """Wait for all launches."""
        self._stream.synchronize()

    def _rows(self, base: int) -> tuple[Copies, list[int]]:
        address = {
            meta.name: base + start
            for meta, start in zip(self._plan.tensors, self._assembly.offset, strict=True)
        }
        segments = [[Segment.whole(meta)] for meta in self._plan.tensors]
        return bucket_rows(self._plan, segments, address, self._slots, into=True)

    def _whole(self, memory: torch.Tensor, tensor: int) -> torch.Tensor:
        meta, start = self._plan.tensors[tensor], self._assembly.offset[tensor]
        dtype: torch.dtype = getattr(torch, meta.dtype)
        return memory[start : start + meta.nbytes].view(dtype).view(meta.shape)

    def _format_of(self, meta: TensorMeta) -> Format | None:
        """Return the format of all parts of a tensor. Raises NoKernelError if they differ."""
        whole = torch.empty(meta.shape, device="meta")
        forms = {self._formats.get(name) for name, _ in as_loaded(meta.name, whole, self._shapes)}
        if len(forms) > 1:
            raise NoKernelError(f"experts of {meta.name} are stored in different formats")
        return forms.pop()

    def _stored_nbytes(self, tensors: Sequence[int]) -> int:
        """Return the bytes of scratch memory that the quantised tensors among `tensors` take."""
        nbytes = 0
        for meta in (self._plan.tensors[tensor] for tensor in tensors):
            if form := self._format_of(meta):
                rows, columns = meta.numel // meta.shape[-1], meta.shape[-1]
                down, across = form.grid((rows, columns))
                nbytes += _aligned(rows * columns) + _aligned(4 * down * across)
        return nbytes

    def _store(
        self, meta: TensorMeta, whole: torch.Tensor, scratch: _Scratch, launches: list[QuantizeLaunch]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is stored of a tensor, by name. Adds the launch that makes it."""
        form, parts = self._format_of(meta), as_loaded(meta.name, whole, self._shapes)
        if form is None:
            yield from parts
            return
        matrix = whole.view(-1, whole.shape[-1])
        if not can_quantize(matrix, form):
            raise NoKernelError(f"{meta.name}: no kernel quantises {meta.dtype} to {form}")
        values = scratch.take(matrix.shape, getattr(torch, form.values))
        scales = scratch.take(form.grid(matrix.shape), torch.float32)
        launches.append(QuantizeLaunch.of(matrix, form, values, scales))
        for name, part in parts:
            first = (part.storage_offset() - whole.storage_offset()) // matrix.shape[1]
            end, block = first + len(part), form.block[0]
            if first % block or (end % block and end < len(matrix)):
                raise NoKernelError(f"{name}: a block of {block} rows would reach into the next expert")
            base = name.removesuffix("weight")
            yield name, values[first:end]
            yield base + form.scale_suffix, scales[first // block : -(-end // block)]

    def _placed(self, name: str, data: torch.Tensor) -> list[tuple[torch.Tensor, BoxPart]]:
        placed = self.places.parts(name, data)
        if any(part.data.data_ptr() != data[part.box.slices()].data_ptr() for _, part in placed):
            raise NoKernelError(f"{name}: it is cast to another dtype")
        return placed


class QuantizingSink:
    """A Sink that quantises what arrives into live parameters. Digests are of the whole tensors.

    Attributes:
        live: the digest of the live parameters.
        is_copied: the holder wrote the live parameters of an equal engine, and no bucket came.
    """

    def __init__(self, tables: QuantizingTables, plan: Plan, parameters: LiveParameters) -> None:
        self._tables, self._plan, self._parameters = tables, plan, parameters
        self.live: LiveDigest | None = None
        self.is_copied = False
        self._next = 0
        self._memory: torch.Tensor | None = None
        self._digests = np.zeros(len(plan.tensors), np.uint64)

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Quantise the tensors that a bucket completes, and write them."""
        assert bucket == self._next
        if self._memory is None:
            # Not kept between updates, in which the engine needs its memory. Mostly it is the same again.
            self._memory = torch.empty(self._tables.nbytes, dtype=torch.uint8, device=pieces[0][2].device)
            self._tables.bind(self._memory)
        self._tables.run(bucket)
        self._next += 1

    def written(self) -> None:
        """Note that the live parameters are copies of an equal engine's."""
        assert self._next == 0, "a holder wrote what buckets had begun to fill"
        self.is_copied = True

    def finish(self) -> None:
        """Wait for all launches, and compare what lives with what was stored."""
        self._tables.wait()
        if self.is_copied:
            return
        if self._next != self._plan.num_buckets:
            raise TransportError(f"{self._next} of {self._plan.num_buckets} buckets came")
        stored = np.zeros(len(self._tables.places.names), np.uint64)
        for step in self._tables.steps:
            self._digests += step.wholes.result()
            stored += step.stored.result()
        if differ := self._tables.places.differing(stored):
            raise TransportError(f"{differ[0]} was written, and live memory holds other bytes")
        self._memory = None

    def digests(self) -> Digests:
        """Return the digests of the whole tensors, after taking `live`."""
        self.live = self._parameters.digest()
        return self._digests

    def abandon(self) -> None:
        """End the update early. The next one writes everything again."""
        self._tables.wait()


class _Scratch:
    """Memory that is handed out in order."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._next = memory, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next contiguous tensor of a shape and dtype."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        found = self._memory[self._next : self._next + nbytes].view(dtype).view(*shape)
        self._next += _aligned(nbytes)
        return found


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
