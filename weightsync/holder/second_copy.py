"""A second copy of an engine rank's weights on the same GPU, beside the served weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from weightsync.errors import DeadlineError, ReadError
from weightsync.holder.snapshots import Held
from weightsync.memory import cuda
from weightsync.memory.device import DeviceBuffer
from weightsync.memory.kernels.bucket_copies import portion_rows
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.plan import Plan, Segment
from weightsync.plan.broadcast.plan import Portion
from weightsync.protocol.messages import Snapshot, SnapshotHeader
from weightsync.transports import Pending

_ALIGN = 256


class CopyQueue(Protocol):
    """Where copies are queued, as in `Staging`."""

    def queue(self) -> AbstractContextManager[None]: ...
    def mark(self, what: str, timeout_s: float) -> Pending: ...


class SecondCopy:
    """Memory for one version. Copy engines fill it while the engine rank serves, one kernel writes it out.

    The GPU's copy engines leave all multiprocessors to the engine meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Segment]],
        address: Mapping[str, int],
        needs: Sequence[Sequence[Portion]],
    ) -> None:
        """Allocate the memory. Raises TransportError if the device is short of memory.

        `segments` and `address` give the places of the rank's tensors. `needs` gives the needed portions of
        each bucket. See `portion_rows`.
        """
        places, end = [], 0
        for portions in needs:
            starts = []
            for portion in portions:
                starts.append(end)
                end += -(-portion.nbytes // _ALIGN) * _ALIGN
            places.append(starts)
        self._memory = DeviceBuffer.create(end)
        data, first = self._memory.tensor, self._memory.tensor.data_ptr()
        self._portions = [
            (portion, data[at : at + portion.nbytes])
            for portions, starts in zip(needs, places, strict=True)
            for portion, at in zip(portions, starts, strict=True)
        ]
        at_address = [[first + at for at in starts] for starts in places]
        copies = portion_rows(plan, segments, address, needs, at_address)
        self._table = CopyTable(copies, (0, len(copies)))
        self._filling = threading.Lock()  # a fill that the driver gave up may still run
        self._holds: tuple[int, str] | None = None

    def fill(self, snapshot: Snapshot, held: Mapping[int, Held], queue: CopyQueue, timeout_s: float) -> None:
        """Copy the portions of `snapshot` that the rank needs from the parts `held`, and wait for the copies.

        Raises DeadlineError, and ReadError if a part was replaced meanwhile.
        """
        if not self._filling.acquire(timeout=timeout_s):
            raise DeadlineError("stage", ("an earlier copy to the GPU",), timeout_s)
        try:
            self._holds = None
            start = {part: its.bytes.data_ptr() for part, its in held.items()}
            with queue.queue():
                stream = torch.cuda.current_stream()
                for portion, place in self._portions:
                    source = start[portion.part] + portion.source
                    cuda.copy(place.data_ptr(), source, portion.nbytes, stream)
                queue.mark("copying to the second copy", timeout_s).wait()
            for part, its in held.items():
                wanted = SnapshotHeader(snapshot.version, snapshot.layout, part)
                if (found := its.header) != wanted:
                    raise ReadError(its.holder, f"it holds {found or 'no snapshot'}, not {wanted}")
            self._holds = snapshot.version, snapshot.layout
        finally:
            self._filling.release()

    def holds(self, snapshot: Snapshot) -> bool:
        """Return True if it was filled with this version, and nothing after it."""
        return self._holds == (snapshot.version, snapshot.layout)

    def struck(self) -> torch.Tensor | None:
        """Return some of the memory, for faults."""
        return self._portions[0][1] if self._portions else None

    def write(self) -> None:
        """Start copying it over the engine rank's weights, on the current stream."""
        self._table.launch(0, torch.cuda.current_stream())

    def close(self) -> None:
        """Free the memory, which must not be in use."""
        with self._filling:
            self._holds = None
            self._portions = []
            self._memory.close()
