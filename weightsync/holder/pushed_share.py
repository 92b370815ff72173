"""A trainer rank's share of each bucket, which the rank copies to memory that the holder can read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weightsync.channel.push import PushFeed
from weightsync.holder.trainer_parts import Part
from weightsync.memory.device import Buffer, open_buffer
from weightsync.plan import Plan
from weightsync.protocol.handles import PushTicket
from weightsync.transports import Pending


class PushedShare:
    """Weights that a trainer rank pushes from host memory whenever a bucket is to be filled.

    The rank owns the buffers that it pushes to, its *ring*: if this process ends, the rank loses nothing. The
    ring holds more buckets than there are slots, so that the link to the host works while slots are taken.
    """

    def __init__(self, plan: Plan, trainer: int, device: str) -> None:
        """`device`: the device of this holder's slots and of the rank's ring; "" for host memory."""
        self._plan, self._trainer, self._shares = plan, trainer, plan.shares(trainer)
        nbytes = max((end - first for first, end in self._shares.values()), default=0)
        self._feed = PushFeed(f"trainer {trainer}", device, max(2 * plan.slots, 1), nbytes)
        self._ring: Sequence[Buffer] = ()
        self._next: deque[int] = deque()
        self._free: deque[int] = deque()
        self._asked: dict[int, tuple[int, int]] = {}
        self._copied: list[int] = []

    @property
    def ticket(self) -> PushTicket:
        """How the rank reaches this process."""
        return self._feed.ticket

    def accept(self, timeout_s: float) -> None:
        """Wait until the rank has connected, and map its ring. Later calls do nothing.

        Raises DeadlineError, WireError if the rank has another plan, TransportError if the ring cannot be
        mapped.
        """
        if not self._ring:
            handles = self._feed.accept(self._plan.digest(), timeout_s)
            self._ring = [open_buffer(handle) for handle in handles]
            self._free.extend(range(len(self._ring)))

    def begin(self, buckets: Iterable[int], timeout_s: float) -> None:
        """Ask for the first of `buckets`, for which `fill` is called in this order. Raises as `drain`."""
        self.drain(timeout_s)
        self._next.extend(bucket for bucket in buckets if bucket in self._shares)
        self._ask()

    def fill(self, bucket: int, slot: torch.Tensor, timeout_s: float) -> Sequence[Pending]:
        """Return the wait for this rank's share of `bucket`, which then queues a copy to `slot`.

        All copies that were queued before must have ended. `wait` raises as `PushFeed.wait`.
        """
        if bucket not in self._shares:
            return ()
        self._free.extend(self._copied)
        self._copied.clear()
        if bucket not in self._asked and bucket not in self._next:
            self._next.append(bucket)
        self._ask()

        def copy() -> Sequence[Pending]:
            ticket, buffer = self._asked.pop(bucket)
            self._feed.wait(ticket, bucket, timeout_s)
            self._copy(bucket, self._ring[buffer].tensor, slot)
            self._copied.append(buffer)
            return ()

        return [Then((), copy)]

    def held(self) -> Iterator[Part]:
        """Yield copies of the parts that the rank would push now. Raises as `PushFeed.wait`."""
        self.drain(_HELD_TIMEOUT_S)
        for bucket in self._shares:
            self._feed.wait(self._feed.ask(bucket, 0), bucket, _HELD_TIMEOUT_S)
            for piece in self._plan.bucket(bucket).pieces:
                if piece.trainer == self._trainer:
                    at = piece.send_buffer_offset - self._shares[bucket][0]
                    data = self._ring[0].tensor[at : at + piece.nbytes].clone()
                    dtype = getattr(torch, self._plan.tensors[piece.tensor].dtype)
                    yield piece.tensor, piece.box, data.view(dtype).view(piece.box.extent)

    def drain(self, timeout_s: float) -> None:
        """Wait until the rank pushes nothing more for an update that failed. Raises as `PushFeed.drain`."""
        self._feed.drain(timeout_s)
        for left in (self._next, self._free, self._asked, self._copied):
            left.clear()
        self._free.extend(range(len(self._ring)))

    def abort(self, cause: str) -> None:
        """End all waits for the rank."""
        self._feed.abort(cause)

    def close(self) -> None:
        """Disconnect, and unmap the ring."""
        self._feed.close()
        for buffer in self._ring:
            buffer.close()
        self._ring = ()

    def _ask(self) -> None:
        """Ask for the next buckets, as many as the ring has room for."""
        while self._next and self._free:
            bucket, buffer = self._next.popleft(), self._free.popleft()
            self._asked[bucket] = self._feed.ask(bucket, buffer), buffer

    def _copy(self, bucket: int, ring: torch.Tensor, slot: torch.Tensor) -> None:
        first, _ = self._shares[bucket]
        for step in self._plan.bucket_steps(bucket):
            if step.trainer == self._trainer:
                at = step.send_buffer_offset - first
                part = ring[at : at + step.nbytes]
                slot[step.offset : step.offset + step.nbytes].copy_(part, non_blocking=True)


_HELD_TIMEOUT_S = 30.0
"""Applies to one bucket, when a mistake is looked for."""


class Then:
    """A pending operation that waits for some operations, then starts more and waits for these."""

    def __init__(self, pending: Sequence[Pending], start: Callable[[], Sequence[Pending]]) -> None:
        self._pending, self._start = pending, start

    def wait(self) -> None:
        for each in self._pending:
            each.wait()
        for each in self._start():
            each.wait()
