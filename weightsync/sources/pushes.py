"""Pushes weights from this process's memory to a holder, without a copy in host memory."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from weightsync.channel.push import Push, PushEnd
from weightsync.errors import StateError
from weightsync.memory import cuda
from weightsync.memory.device import Buffer, DeviceBuffer
from weightsync.memory.host import SharedBuffer
from weightsync.memory.page_locks import PageLocks
from weightsync.memory.tensors import device_id
from weightsync.plan import Piece, Plan, Segment
from weightsync.protocol.handles import PushTicket
from weightsync.protocol.messages import Digests, Published, combine
from weightsync.sources.piece_copies import PieceCopies

logger = logging.getLogger("weightsync.sources")

_END_S = 5.0

_Run: TypeAlias = tuple[int, int, int]
"""Bytes that are copied at once: offset in the share of a bucket, address, and how many."""


class Pushes:
    """One epoch's pieces in host memory. A holder asks for them bucket by bucket.

    If pages can be locked, bytes are copied from the weights straight to the GPU. Small tensors, and tensors
    that need a cast, are first copied to memory of this object.
    """

    def __init__(self, plan: Plan, trainer: int, ticket: PushTicket) -> None:
        """Make the ring. Raises TransportError when memory is short, StateError if the GPU is another."""
        self._plan, self._shares, self._ticket = plan, plan.shares(trainer), ticket
        # Pages that nothing is copied to are never touched, and take no memory.
        self._memory = torch.empty(plan.send_buffer_nbytes(trainer), dtype=torch.uint8)
        self._device = _require_current(ticket.device) if ticket.device else None
        self._stream: torch.cuda.Stream | None = None
        make: Callable[[int], Buffer] = SharedBuffer.create
        if self._device:
            make, self._stream = DeviceBuffer.create, torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with self._on_device():
            self._ring = [make(ticket.nbytes) for _ in range(ticket.num_buffers)]
        self._copies: PieceCopies | None = None
        self._copied: Published | None = None
        self._locks: list[PageLocks] = []
        self._runs: Mapping[int, Sequence[_Run]] = {}
        self._busy = threading.Lock()
        self._end: PushEnd | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weightsync-pushes")

    def prepare(
        self,
        pieces: Sequence[tuple[Piece, Segment]],
        live: Mapping[str, torch.Tensor],
        strays: Collection[str],
    ) -> None:
        """Lock the pages of `live`, and prepare to push `pieces`. Called again if tensors have moved."""
        with self._busy, self._on_device():
            self._unlock()
            stays = self._lock(live.values()).cover if self._device else _always
            self._copies = PieceCopies(self._plan, pieces, live, strays, self._memory, stays)
            if self._device:
                self._lock(map(self._copies.place, self._copies.copies))
            self._runs = self._find_runs(self._copies)

    def start(self) -> None:
        """Connect to the holder and serve its requests. Raises PeerLostError if the holder is gone."""
        self._end = PushEnd(self._ticket, self._plan.digest(), tuple(buffer.handle for buffer in self._ring))
        self._thread.start()

    def copy(self, find: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Copy pieces that are not pushed in place, as `PieceCopies.run`. Holders may ask afterwards."""
        assert self._copies
        self._copied = self._copies.run(find, count=True)

    def digest(self, count: bool) -> Published:
        """Digest weights that are pushed in place. The result includes the results of `copy`."""
        assert self._copies
        assert self._copied
        kept = self._copies.digest_kept(count)
        # A tensor may be pushed in part, and copied in part.
        nonfinite = Counter(kept.nonfinite) + Counter(self._copied.nonfinite)
        return Published(combine([kept.digests, self._copied.digests]), dict(nonfinite))

    def digest_again(self, find: Callable[[], Mapping[str, torch.Tensor]]) -> Digests:
        """Digest all weights in the rank's memory, as they are now. `find` as in `PieceCopies.run`."""
        assert self._copies
        return self._copies.digest_again(find)

    def close(self) -> None:
        """Disconnect, and release all memory."""
        if self._end:
            self._end.hang_up()
            self._thread.join(_END_S)
            if self._thread.is_alive():
                logger.warning("a copy to a holder does not end: its memory stays taken")
                return
            self._end.close()
        with self._on_device():
            self._unlock()
            for buffer in self._ring:
                buffer.close()

    def _serve(self) -> None:
        """Answer the holder's asks until the connection ends."""
        assert self._end
        with self._on_device():
            while ask := self._end.receive():
                with self._busy:
                    self._push_all(ask, self._end)

    def _push_all(self, first: Push, end: PushEnd) -> None:
        """Push `first` and later requests: while one copy runs, the next is queued."""
        ask: Push | None = first
        started: deque[Callable[[], str]] = deque()
        tickets: deque[int] = deque()
        while ask or started:
            if ask:
                started.append(self._push(ask))
                tickets.append(ask.ticket)
            ask = end.receive() if len(started) < len(self._ring) and end.has_ask() else None
            if not ask:
                end.answer(tickets.popleft(), started.popleft()())

    def _push(self, ask: Push) -> Callable[[], str]:
        """Start to copy a bucket. Returns a function that waits, and returns an error or ""."""
        event: torch.cuda.Event | None = None
        failed = ""
        try:
            target = self._ring[ask.buffer].tensor.data_ptr()
            for at, address, nbytes in self._runs.get(ask.bucket, ()):
                if self._stream:
                    cuda.copy(target + at, address, nbytes, self._stream)
                else:
                    ctypes.memmove(target + at, address, nbytes)
            event = self._stream.record_event() if self._stream else None
        except Exception as error:  # noqa: BLE001 - CUDA's errors have no common class
            failed = _told(ask, error)

        def finish() -> str:
            try:
                if event:
                    event.synchronize()
            except Exception as error:  # noqa: BLE001 - as above
                return _told(ask, error)
            return failed

        return finish

    def _find_runs(self, copies: PieceCopies) -> Mapping[int, Sequence[_Run]]:
        """Return the copies for each bucket. Parts that are adjacent on both sides are one run."""
        placed = [(copy, cut.data_ptr()) for copy, cut in copies.kept]
        placed += [(copy, copies.place(copy).data_ptr()) for copy in copies.copies]
        runs: defaultdict[int, list[_Run]] = defaultdict(list)
        for copy, address in sorted(placed, key=lambda each: each[0].start):
            at = copy.start - self._shares[copy.bucket][0]
            nbytes = copy.box.numel * self._plan.tensors[copy.tensor].itemsize
            last_at, last_address, last_nbytes = (runs[copy.bucket] or [(0, 0, 0)])[-1]
            if (last_at + last_nbytes, last_address + last_nbytes) == (at, address):
                runs[copy.bucket][-1] = last_at, last_address, last_nbytes + nbytes
            else:
                runs[copy.bucket].append((at, address, nbytes))
        return runs

    def _lock(self, tensors: Iterable[torch.Tensor]) -> PageLocks:
        self._locks.append(PageLocks(tensors))
        return self._locks[-1]

    def _unlock(self) -> None:
        while self._locks:
            self._locks.pop().close()

    def _on_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self._device) if self._device else nullcontext()


def _always(_: torch.Tensor) -> bool:
    return True


def _told(ask: Push, error: Exception) -> str:
    logger.error("bucket %d cannot be pushed", ask.bucket, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _require_current(device: str) -> torch.device:
    """Return this process's current GPU. Raises StateError if it is not `device`, that of the holder."""
    current = torch.device("cuda", torch.cuda.current_device())
    if (found := device_id(current)) != device:
        raise StateError(f"the current device is {found} now, and was {device}: connect() again")
    return current
