"""Deadlines for operations in which the calling thread may hang."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from functools import partial

from weightsync.config import TlsFiles
from weightsync.errors import TransportError, WireError
from weightsync.protocol.daemon import on_daemon
from weightsync.transports.base import Broadcast, Op
from weightsync.transports.roll_call import Absence, RollCall, ranks_text
from weightsync.transports.store import NetworkStore, StoreServer

logger = logging.getLogger("weightsync.transports")

SLACK_S = 1.0
"""Time after a rank's deadline until the rank has named the missing ranks."""
TIMER_S = 0.05
LISTENER_S = 0.2
ROLL_CALL_S = 1.8
"""A longer roll call hangs: the store does not answer. Less than callers allow on top."""
LOST_S = 2.0
"""How long an operation may continue after rank 0's store is gone. It may be nearly done."""
END_S = 10.0


@dataclass(slots=True)
class _Operation:
    started: float
    meetings: dict[int, int]
    is_over: Callable[[], bool]


class Watch:
    """Ends a communicator: at an operation's deadline, when a rank left, or by `end`.

    There are two daemon threads. The timer checks deadlines and never calls the store. The listener asks the
    store whether another rank left or called the roll; it may hang if rank 0, the store's host, is stopped.
    """

    def __init__(
        self,
        roll: RollCall,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        stop: Callable[[], None],
        probe: Callable[[], None],
    ) -> None:
        """`stop` frees threads that hang in the library. It is called once, from any thread.

        `probe` raises TransportError for a reported fault of the library. It is called while an operation is
        running.
        """
        self._roll, self._rank, self._num_ranks, self._timeout_s = roll, rank, num_ranks, timeout_s
        self._stop, self._probe = stop, probe
        self._lock = threading.Lock()
        self._count = 0
        self._meetings: Counter[int] = Counter()
        self._operations: dict[int, _Operation] = {}
        self._cause, self._fault = "", ""
        self._stopped, self._closed, self._late = threading.Event(), threading.Event(), threading.Event()
        self._lost_at, self._last_over = float("inf"), 0.0
        self._listener = threading.Thread(target=self._listen, daemon=True, name="weightsync-listener")
        self._listener.start()
        threading.Thread(target=self._keep, daemon=True, name="weightsync-timer").start()

    def set_timeout(self, timeout_s: float) -> None:
        """Give operations `timeout_s` seconds from now on."""
        self._timeout_s = timeout_s

    def begin(self, ops: Sequence[Op]) -> int:
        """Register an operation. Returns its number, from 1. Raises TransportError."""
        self.check()
        now, peers = time.monotonic(), self._peers(ops)
        with self._lock:
            self._count += 1
            self._meetings.update(peers)
            meetings = {peer: self._meetings[peer] for peer in peers}
            self._operations[self._count] = _Operation(now, meetings, lambda: False)
            return self._count

    def _peers(self, ops: Sequence[Op]) -> set[int]:
        """Return the other ranks that `ops` concern."""
        if any(isinstance(op, Broadcast) for op in ops):
            return {*range(self._num_ranks)} - {self._rank}
        return {op.peer for op in ops if not isinstance(op, Broadcast)} - {self._rank}

    def follow(self, number: int, is_over: Callable[[], bool]) -> None:
        """Set `is_over`, which is called before `done`: an ended operation is not late."""
        with self._lock:
            self._operations[number].is_over = is_over

    def done(self, number: int) -> None:
        """Mark the operation as done. Raises TransportError if the communicator has ended."""
        self.check()
        with self._lock:
            if self._operations.pop(number, None):
                self._last_over = time.monotonic()

    def check(self) -> None:
        """Raise TransportError if the communicator has ended, once `stop` returned (within `END_S`)."""
        if self._cause:
            self._stopped.wait(END_S)
            raise TransportError(self._cause)

    def fail(self, fault: str) -> None:
        """End because of `fault` in the library, after a roll call. Raises TransportError."""
        self._fault = fault
        give_up = time.monotonic() + ROLL_CALL_S
        while not self._cause and time.monotonic() < give_up:  # the timer calls the roll
            self._closed.wait(TIMER_S)
        self.end(fault)
        self.check()

    def end(self, cause: str) -> None:
        """Make every wait raise TransportError(`cause`); the first cause counts. Waits for `stop`."""
        with self._lock:
            first, self._cause = not self._cause, self._cause or cause
        if first:
            on_daemon(self._stop).add_done_callback(self._has_stopped)
        if not self._stopped.wait(END_S):
            logger.warning("a communicator does not end within %g s: %s", END_S, self._cause)

    def close(self) -> None:
        """End, tell the other ranks, and stop using the store. Safe to call twice."""
        self._closed.set()
        self._late.set()
        self.end("the transport is closed")
        self._listener.join(1.0)

    def _has_stopped(self, stop: Future[None]) -> None:
        if error := stop.exception():
            logger.warning("a communicator did not end cleanly: %s", error)
        self._stopped.set()

    def _keep(self) -> None:
        while not (self._closed.wait(TIMER_S) or self._cause):
            oldest = self._oldest()
            if oldest is None:
                continue
            number, operation = oldest
            now = time.monotonic()
            # An operation's time starts when it is the oldest: waits of earlier operations do not count.
            if now > max(operation.started, self._last_over) + self._timeout_s or self._fault:
                self._call_roll(number)
            elif now - max(self._lost_at, operation.started) > LOST_S:
                self.end(self._host_gone(number, "is gone"))
            else:
                try:
                    self._probe()
                except TransportError as error:
                    self._fault = str(error)

    def _call_roll(self, number: int) -> None:
        self._late.set()
        give_up = time.monotonic() + ROLL_CALL_S
        while not self._cause and not self._closed.is_set() and number in self._operations:
            if time.monotonic() > give_up or self._lost_at < float("inf"):
                self.end(self._host_gone(number, "does not answer"))
            self._closed.wait(TIMER_S)

    def _listen(self) -> None:
        try:
            while not (self._closed.is_set() or self._cause):
                is_late = self._late.wait(LISTENER_S)
                if not (is_late or self._roll.has_news()):
                    continue
                if is_late or self._roll.called():
                    if not self._closed.is_set() and not self._cause:
                        self._answer()
                else:
                    self._heed_leavers()
            self._roll.leave(self._met(), self._cause or "closed")
        except RuntimeError:
            self._lost_at = time.monotonic()

    def _answer(self) -> None:
        oldest = self._oldest()
        if self._late.is_set() and oldest:
            self._roll.call(oldest[0], oldest[1].meetings, self._fault)
        if self._roll.called():
            self.end(self._verdict(self._roll.answer(self._met(), waiting=oldest is not None)))
        else:
            self._late.clear()

    def _heed_leavers(self) -> None:
        """End if the oldest operation needs a rank that left."""
        left = self._roll.left()
        oldest = self._oldest()
        if oldest is None:
            return
        number, operation = oldest
        for rank, (meetings, cause) in left.items():
            if operation.meetings.get(rank, 0) > meetings:
                self.end(f"{ranks_text([rank], self._num_ranks)} left before operation {number}: {cause}")

    def _verdict(self, absence: Absence) -> str:
        missing = absence.silent if absence.fault else absence.silent + absence.behind
        ranks = ranks_text(missing, self._num_ranks)
        if absence.fault:
            lost = f"{ranks} is lost in operation {absence.operation}: " if missing else ""
            return f"{lost}{absence.fault}"
        operation = f"operation {absence.operation} within {self._timeout_s:g} s"
        if missing:
            return f"{ranks} did not come to {operation}"
        return f"every rank came to {operation} of rank {absence.caller}, and it did not finish"

    def _host_gone(self, number: int, how: str) -> str:
        return f"rank 0 of {self._num_ranks}, which hosts the rendezvous, {how} (operation {number})"

    def _met(self) -> dict[int, int]:
        with self._lock:
            return dict(self._meetings)

    def _oldest(self) -> tuple[int, _Operation] | None:
        """Return the oldest running operation, and forget ended operations."""
        with self._lock:
            for number, operation in sorted(self._operations.items()):
                if not operation.is_over():
                    return number, operation
                del self._operations[number]
                self._last_over = time.monotonic()
        return None


class WatchedTransport:
    """Base class of transports. A subclass sets the fields in `offer` and `open`."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        """`tls`: this process's files, if the rendezvous speaks TLS. Bytes are moved without TLS."""
        self._tls = tls
        self._server: StoreServer | None = None
        self._store: NetworkStore | None = None
        self._opened: Watch | None = None
        self._rank, self._num_ranks = -1, 0

    def _sign_in(
        self, address: str, rank: int, num_ranks: int, timeout_s: float
    ) -> tuple[NetworkStore, RollCall]:
        """Return the store that rank 0 serves, and the roll there, once every rank has signed in.

        Raises TransportError with the ranks that did not sign in within `timeout_s`.
        """
        assert self._opened is None, "a transport opens once"
        self._rank, self._num_ranks = rank, num_ranks
        store = NetworkStore(address, timeout_s, self._tls)
        roll = RollCall(store, rank, num_ranks)
        try:
            on_daemon(partial(roll.sign_in, timeout_s)).result(timeout_s + SLACK_S)
            self._store = store
        except (Late, RuntimeError, ValueError, WireError) as error:
            cause = "rank 0, which hosts it, does not answer" if isinstance(error, Late) else error
            place = address.rpartition("@")[2]
            raise TransportError(f"rank {rank} of {num_ranks} could not join at {place}: {cause}") from error
        finally:
            if self._store is None:
                store.close()
        return store, roll

    @property
    def _watch(self) -> Watch:
        assert self._opened, "open the transport first"
        return self._opened

    def set_timeout(self, timeout_s: float) -> None:
        """Give operations `timeout_s` from now on, as `Transport.set_timeout` says."""
        self._watch.set_timeout(timeout_s)

    def abort(self, cause: str) -> None:
        """Give up the communicator, as `Transport.abort` says."""
        if self._opened:
            self._opened.end(cause)

    def close(self) -> None:
        """Leave the communicator, and close the store."""
        if self._opened:
            self._opened.close()
        for each in (self._store, self._server):
            if each:
                each.close()
