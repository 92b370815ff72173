"""Where a holder's buckets lie, and how its own share of a bucket gets there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from weightsync.holder.send_buffer import MappedSendBuffer, SendBuffer
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan, Step
from weightsync.protocol.handles import Export, Handle
from weightsync.transports import Pending

if TYPE_CHECKING:
    import torch

    from weightsync.holder.snapshots import FlatSnapshot
    from weightsync.plan import Reads
    from weightsync.protocol.handles import DeviceHandle

__all__ = ["HostStaging", "Staging"]


class Staging(Protocol):
    """The bucket slots of one holder. Its methods are called from one thread."""

    @property
    def device(self) -> str:
        """Where torch has the slots: ``cpu`` or ``cuda``."""

    @property
    def slots(self) -> tuple[Handle, ...]:
        """The slots that an engine rank maps."""

    @property
    def writes(self) -> bool:
        """Whether the engine rank's memory is written from here, so that it need not read the slots."""

    def connect(self, trainer: Export) -> None:
        """Read the trainer's memory in place. Raises TransportError when it cannot be mapped."""

    def link(self, engine: Export | None) -> None:
        """Write the engine rank's memory, in place of that of the last one. Raises TransportError."""

    @property
    def flat(self) -> FlatSnapshot | None:
        """The engine rank's memory, where it is written from here."""

    @property
    def source(self) -> Mapping[str, torch.Tensor]:
        """The buffers of the trainer's memory that is read in place: uint8, one dimension."""

    @property
    def target(self) -> Mapping[str, torch.Tensor]:
        """Those of the engine rank's memory that is written from here."""

    def route(self, reads: Reads, memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        """Prepare `start_direct_copy`. `memory`: the trainers', by rank and buffer. Raises TransportError."""

    def start_direct_copy(self) -> None:
        """Begin to copy the engine rank's part out of the trainers' memory into its own."""

    def queue(self) -> AbstractContextManager[None]:
        """What `fill` and the broadcasts after it have to run in: on a device, a stream."""

    def mark(self, what: str, timeout_s: float) -> Pending:
        """The end of what was queued so far, called `what` when that takes longer than `timeout_s`."""

    def fill(self, bucket: int, timeout_s: float) -> Sequence[Pending]:
        """Begin to put this holder's share of `bucket` where `at` says it is sent from."""

    def targets(self) -> Sequence[SharedBuffer]:
        """Host memory that a refill reads buckets into, in turn."""

    def put(self, bucket: int, timeout_s: float) -> None:
        """Bring a bucket from its target to its slot. Raises DeadlineError."""

    def write(self, bucket: int) -> None:
        """Begin to write a bucket, which is there, to the engine rank. Later filling waits for it."""

    def settle(self, timeout_s: float) -> None:
        """Return once all that was begun is written. Raises DeadlineError."""

    def at(self, step: Step) -> torch.Tensor:
        """Where the bytes of `step` are sent from, or received to: uint8, one dimension."""

    def close(self) -> None:
        """Let go of what belongs to this epoch."""


class HostStaging:
    """Slots in shared memory. What this holder sends goes out of its send buffer, if that is its own."""

    device = "cpu"

    def __init__(self, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool) -> None:
        self._index, self._send_buffer = index, send_buffer
        count = plan.slots if receives or isinstance(send_buffer, MappedSendBuffer) else 0
        self._slots = [SharedBuffer.create(plan.max_bucket_nbytes) for _ in range(count)]

    @property
    def slots(self) -> tuple[Handle, ...]:
        return tuple(slot.handle for slot in self._slots)

    writes = False
    flat: FlatSnapshot | None = None
    source: Mapping[str, torch.Tensor] = {}
    target: Mapping[str, torch.Tensor] = {}

    def connect(self, trainer: Export) -> None:
        raise AssertionError("what lies on the host is not exported")

    def link(self, engine: Export | None) -> None:
        assert engine is None, "what lies on the host is not exported"

    def route(self, reads: Reads, memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        raise AssertionError("what lies on the host is not exported")

    def start_direct_copy(self) -> None:
        raise AssertionError("what lies on the host is not exported")

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
        """The targets are the slots."""

    def write(self, bucket: int) -> None:
        raise AssertionError("nothing is exported to a holder on the host")

    def settle(self, timeout_s: float) -> None:
        """Nothing is under way."""

    def at(self, step: Step) -> torch.Tensor:
        if step.root == self._index and isinstance(self._send_buffer, SharedBuffer):
            return self._send_buffer.tensor[step.send_buffer_offset : step.send_buffer_offset + step.nbytes]
        return self._slots[step.bucket % len(self._slots)].tensor[step.offset : step.offset + step.nbytes]

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


class _Done:
    """The host waits for what it does itself."""

    def wait(self) -> None: ...
