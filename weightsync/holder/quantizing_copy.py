"""Direct copies for a rank with quantised weights, which are quantised as they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightsync.holder.mapped_trainers import MappedTrainers
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.plan import Reads
from weightsync.plan.direct.whole_sources import WholeSource, whole_sources
from weightsync.protocol.handles import DeviceHandle
from weightsync.protocol.messages import HolderDigests
from weightsync.quantising.quantizing_reads import NUM_SLOTS, QuantizingReads

_NUM_BLOCKS = 264
"""Thread blocks of a copy. The copy shares multiprocessors with the kernel that quantises earlier copies.

With half of them, 16 GB by a link took 49 ms in place of 46.
"""


_ALIGN = 16
"""Bytes that a kernel loads at once."""


class QuantizingCopy:
    """The copies of one engine rank, made once per connect. Uses the current device.

    They are started group by group. Each group is quantised while the next groups are copied.
    """

    def __init__(
        self,
        quantizing: QuantizingReads,
        reads: Sequence[Reads],
        memory: Mapping[tuple[int, str], DeviceHandle],
        scratch: torch.Tensor,
    ) -> None:
        """
        Args:
            reads: all that `quantizing` needs.
            memory: the trainers' buffers, by rank and name.
            scratch: memory to read to: uint8, ``quantizing.nbytes`` or more.

        Raises:
            NoKernelError: no kernel quantises one of them.
            TransportError: a trainer's memory cannot be mapped.
        """
        self._quantizing, self._scratch = quantizing, scratch
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._trainers = MappedTrainers(memory)
        try:
            in_place = quantizing.in_place.items()
            sources = {name: self._trainers.rest(each.key, each.offset) for name, each in in_place}
            address = quantizing.bind(scratch, sources)
            self._copies = [
                _grouped(part, quantizing, self._trainers.starts, address) for part in reads if len(part)
            ]
            self._trainers.touch()
        except BaseException:
            self.close()
            raise

    def begin(self, stream: torch.cuda.Stream, _frozen: bool) -> QuantizingCopy:
        """Start everything, frozen or not, without waiting for it. `stream` waits for the last of it."""
        quantizing, done = self._quantizing, list[torch.cuda.Event]()
        quantizing.begin(self._stream)
        for group in range(quantizing.num_groups):
            if group > NUM_SLOTS:
                stream.wait_event(done[group - NUM_SLOTS])
            for copies in self._copies:
                copies.launch(group, stream)
            self._stream.wait_event(stream.record_event())
            quantizing.launch(group, self._stream)
            done.append(self._stream.record_event())
        stream.wait_event(done[-1])
        return self

    def result(self) -> HolderDigests:
        """Return the digests of the read and the quantised bytes, after waiting for `stream` of `begin`."""
        return self._quantizing.result()

    def close(self) -> None:
        """Unmap the trainers' memory. No copy may be running."""
        self._trainers.close()


def sources_on(
    device: str, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]
) -> dict[str, WholeSource]:
    """Return the sources that are read whole from `device`, aligned so that kernels can read them.

    Args:
        device: as in a `DeviceHandle`.
        reads: parts that have no target in common.
        memory: see `QuantizingCopy`.
    """
    found = {name: each for part in reads for name, each in whole_sources(part).items()}
    return {
        name: each
        for name, each in found.items()
        if (handle := memory[each.key]).device == device and (handle.offset + each.offset) % _ALIGN == 0
    }


def _grouped(
    reads: Reads,
    quantizing: QuantizingReads,
    start: Mapping[tuple[int, str], int],
    address: Mapping[str, int],
) -> CopyTable:
    """Return the copies in groups. Each group has the order of the reads, in which trainers take turns."""
    of_buffer = np.array([quantizing.group_of.get(name, 0) for name in reads.dst_names], np.int64)
    stays = np.array([name in quantizing.in_place for name in reads.dst_names], bool)
    moved = np.flatnonzero(~stays[reads.dst_buffer])
    group = of_buffer[reads.dst_buffer[moved]]
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(quantizing.num_groups + 1))
    return CopyTable(reads.take(moved[order]).copies(start, address), bounds.tolist(), _NUM_BLOCKS)
