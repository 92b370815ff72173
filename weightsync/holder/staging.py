"""A holder's bucket slots, and the copies into and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from weightsync.holder.send_buffer import MappedSendBuffer, SendBuffer
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan, Step
from weightsync.protocol.handles import Handle
from weightsync.transports import Pending

if TYPE_CHECKING:
    from weightsync.holder.device_staging import DeviceStaging  # imports CuPy


class Staging(Protocol):
    """The bucket slots of one holder. `Holder` calls the methods, from one thread at a time."""

    @property
    def device(self) -> str:
        """The torch device of the slots: ``cpu`` or ``cuda``."""

    @property
    def slots(self) -> tuple[Handle, ...]:
        """Handles of the slots, for an engine rank to map."""

    @property
    def mapped(self) -> DeviceStaging | None:
        """The memory of other processes on the device. None in host memory, which nobody exports."""

    def forget_engine(self) -> None:
        """Use the engine rank's memory no more, if any is mapped."""

    def unmap_forgotten(self) -> None:
        """Start to unmap forgotten memory."""

    def queue(self) -> AbstractContextManager[None]:
        """Return a context for `fill` and for broadcasts: on a device, a stream."""

    def mark(self, what: str, timeout_s: float) -> Pending:
        """Return the end of all work queued so far. A DeadlineError after `timeout_s` calls it `what`."""

    def fill(self, bucket: int, timeout_s: float) -> Sequence[Pending]:
        """Start copying this holder's share of `bucket` to where `at` sends it from."""

    def targets(self) -> Sequence[SharedBuffer]:
        """Return the host buffers that a refill reads buckets into, in turn."""

    def put(self, bucket: int, timeout_s: float) -> None:
        """Copy a bucket from its target to the bucket's slot. Raises DeadlineError."""

    def at(self, step: Step) -> torch.Tensor:
        """Return the memory that `step` is sent from or received in: uint8, one dimension."""

    def close(self) -> None:
        """Free or unmap the memory of this epoch."""


class HostStaging:
    """Slots in shared memory. A `SharedBuffer` as send buffer is sent from directly."""

    device = "cpu"
    mapped = None

    def __init__(self, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool) -> None:
        self._index, self._send_buffer = index, send_buffer
        fills = isinstance(send_buffer, MappedSendBuffer)
        count, nbytes = plan.slots if receives or fills else 0, plan.max_bucket_nbytes
        self._slots = [SharedBuffer.create(nbytes) for _ in range(count)]

    def forget_engine(self) -> None:
        """Do nothing: none is mapped."""

    unmap_forgotten = forget_engine

    @property
    def slots(self) -> tuple[Handle, ...]:
        return tuple(slot.handle for slot in self._slots)

    def queue(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, what: str, timeout_s: float) -> Pending:
        return _Done()

    def fill(self, bucket: int, timeout_s: float) -> Sequence[Pending]:
        if isinstance(self._send_buffer, MappedSendBuffer):
            self._send_buffer.fill(bucket, self._slots[bucket % len(self._slots)].tensor)
        return ()

    def targets(self) -> Sequence[SharedBuffer]:
        return self._slots

    def put(self, bucket: int, timeout_s: float) -> None:
        """Do nothing: the targets are the slots."""

    def at(self, step: Step) -> torch.Tensor:
        if step.root == self._index and isinstance(self._send_buffer, SharedBuffer):
            return self._send_buffer.tensor[step.send_buffer_offset : step.send_buffer_offset + step.nbytes]
        return self._slots[step.bucket % len(self._slots)].tensor[step.offset : step.offset + step.nbytes]

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


class _Done:
    """A pending operation that has ended: the host copies synchronously."""

    def wait(self) -> None: ...
