"""Writes buckets straight into live parameters, on a device (one kernel each) or the host."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from weightsync.channel.sink import PieceView
from weightsync.engines.loading.host_writer import HostTables
from weightsync.errors import StateError, TransportError
from weightsync.memory.device import export_tensors
from weightsync.memory.kernels.bucket_copies import bucket_rows
from weightsync.memory.kernels.copied_experts import added, by_factor
from weightsync.memory.kernels.device_kernels import CopyTable, DigestTable
from weightsync.memory.kernels.digests import segment_parts
from weightsync.plan import Box, Plan, RankLayout, Segment
from weightsync.plan.broadcast.plan import by_tensor
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.messages import Digests, HolderDigests
from weightsync.text import count_text

logger = logging.getLogger("weightsync.engines")


class LiveWriter:
    """A Sink for parameters that hold slices of the checkpoint's bytes, as `layout` says.

    Args:
        layout: the segments say which box of which tensor is where in which buffer.
        live: the buffers by name.
        slots: the bucket slots, uint8, as in `EngineFeed.slots`.
        readable: whether there is memory behind the buffers' addresses now. A sleeping engine has none.
        views: as in `EngineFeed.views`, for memory on the host; pieces not in it are copied more slowly.
        casts: as `EngineFeed.casts`. Pieces are copied, not slots, and holders do not write the memory.
        late: `export` will be called. It prepares digests of memory on a device, on another thread, and the
            first load waits for them.
    """

    @collector_paused
    def __init__(
        self,
        plan: Plan,
        layout: RankLayout,
        live: Mapping[str, torch.Tensor],
        slots: Sequence[torch.Tensor],
        readable: bool = True,
        views: Sequence[Sequence[PieceView]] = (),
        casts: bool = False,
        late: bool = False,
    ) -> None:
        self._plan, self._live = plan, live
        segments = by_tensor(plan, layout)
        self._address = {name: tensor.data_ptr() for name, tensor in live.items()}
        self._next = 0
        self._by_holder: Digests | None = None
        self._trusts_holder: bool | None = None
        self._missing = Missing(plan)
        for bucket in plan.buckets() if plan.slots else ():
            for piece in bucket.pieces:
                self._missing.count(piece.tensor, piece.box)
        digested = by_factor(segments, layout)
        self._has_copies = len(digested) > 1
        on_device = not casts and all(memory.is_cuda for memory in (*slots, *live.values()))
        self._device = _DeviceTables(plan, segments, digested, self._address, slots) if on_device else None
        self._host = None if on_device else HostTables(plan, segments, live, views, digested)
        if self._device and not readable:
            self._device.copies()
            self._device.digest_tables()
        elif self._device and not late:
            self._device.digests()  # the first use compiles

    def begin(self, live: Mapping[str, torch.Tensor] | None) -> None:
        """Start a load. `live` are the engine's current buffers; None if it knows that none moved.

        Raises StateError if a buffer has moved: then the engine would not serve the memory written here.
        """
        self._next, self._by_holder = 0, None
        if live is None:
            return
        for name, address in self._address.items():
            if live[name].data_ptr() != address:
                raise StateError(f"{name} is in other memory than when it was connected: connect() again")

    def export(self) -> DeviceMemory | None:
        """Export the live memory for the holder to write; None if it cannot be shared."""
        if self._device is None:
            return None
        try:
            return export_tensors(self._live)
        except TransportError as error:
            logger.warning("buckets are copied by the engine: %s", error)
            self._device.copies()
            return None
        finally:  # not earlier: another thread would hold up each call of CUDA
            self._device.prepare_digests()

    def written(self, by_holder: HolderDigests | None = None) -> None:
        """Note that all further buckets are in memory, with the holder's digests of them."""
        self._next = self._plan.num_buckets
        # A holder's sums count each copy of an expert.
        self._by_holder = by_holder.wholes if by_holder and not self._has_copies else None

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Copy one bucket into the live parameters."""
        assert bucket == self._next
        if self._device:
            self._device.copy(bucket)
        elif self._host:
            self._host.copy(pieces)
        self._next += 1

    def finish(self) -> None:
        """Check that every bucket came and that they hold every tensor."""
        if self._next != self._plan.num_buckets:
            raise TransportError(f"{self._next} of {self._plan.num_buckets} buckets came")
        if self._plan.slots:  # else holders write all; that their reads cover it was proven when planned
            self._missing.require_none()

    def digests(self) -> Digests:
        """Return the digests of live memory.

        If the holder took digests, they are returned. The first time, this rank takes digests too: if the two
        differ, the holder reads other memory, and the holder's digests are not used.
        """
        if self._by_holder is not None and self._trusts_holder:
            return self._by_holder
        tables = self._device or self._host
        assert tables
        found = tables.digests()
        if self._by_holder is not None and self._trusts_holder is None:
            self._trusts_holder = bool((found == self._by_holder).all())
            if not self._trusts_holder:
                logger.warning("a holder's digests of live memory are not used: this rank has others")
        return found


def exported(live: Mapping[str, torch.Tensor]) -> DeviceMemory | None:
    """Export the live memory; None if it cannot be shared. `LiveWriter.export` logs why not."""
    try:
        memory = export_tensors(live) if all(each.is_cuda for each in live.values()) else None
    except TransportError:
        return None
    return memory if memory and memory.owners else None


class _DeviceTables:
    """Tables of all copies and digests, prepared once and kept on the device."""

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Segment]],
        digested: Mapping[int, Sequence[Sequence[Segment]]],
        address: Mapping[str, int],
        slots: Sequence[torch.Tensor],
    ) -> None:
        """`digested`: the segments by the factor of their digests, see `by_factor`."""
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        starts = [slot.data_ptr() for slot in slots]
        self._rows = partial(bucket_rows, plan, segments, address, starts, into=True)
        self._copies: CopyTable | None = None
        self._make = partial(_digest_tables, plan, digested, address, self._stream)
        self._made: Future[Mapping[int, DigestTable]] | None = None

    def prepare_digests(self) -> None:
        """Start to make the digest tables on another thread, if they are not made."""
        self._made = self._made or on_daemon(self._make, "weightsync-digests")

    def copies(self) -> CopyTable:
        """Return the copy table. Made when needed: if the holder writes, it is not."""
        self._copies = self._copies or CopyTable(*self._rows())
        return self._copies

    def copy(self, bucket: int) -> None:
        self.copies().launch(bucket, self._stream)
        self._stream.synchronize()

    def digest_tables(self) -> Mapping[int, DigestTable]:
        """Return the digest tables by factor. Raises the error of making them."""
        if self._made is None:
            made = Future[Mapping[int, DigestTable]]()
            made.set_result(self._make())
            self._made = made
        return self._made.result()

    def digests(self) -> Digests:
        tables = self.digest_tables()
        for table in tables.values():
            table.launch(self._stream)
        found = {factor: table.result() for factor, table in tables.items()}
        return added(found) if len(found) > 1 else found[1]


@collector_paused
def _digest_tables(
    plan: Plan,
    digested: Mapping[int, Sequence[Sequence[Segment]]],
    address: Mapping[str, int],
    stream: torch.cuda.Stream,
) -> Mapping[int, DigestTable]:
    with torch.cuda.device(stream.device):  # a new thread has another
        return {
            factor: DigestTable(segment_parts(plan, segments, address), len(plan.tensors))
            for factor, segments in digested.items()
        }


class Missing:
    """Counts the elements that no piece has brought. The plan has proven that pieces do not overlap."""

    def __init__(self, plan: Plan) -> None:
        self._tensors = plan.tensors
        self._left = [meta.numel for meta in plan.tensors]

    def count(self, tensor: int, box: Box) -> bool:
        """Count one piece. Returns True if the piece's tensor is now complete."""
        self._left[tensor] -= box.numel
        return self._left[tensor] == 0

    def require_none(self) -> None:
        """Raise TransportError, with names, if a tensor is incomplete."""
        names = [meta.name for meta, left in zip(self._tensors, self._left, strict=True) if left]
        if names:
            count = count_text(len(names), "tensor")
            raise TransportError(f"bytes of {count} did not come: {', '.join(names[:3])}")
