"""The roll call: finds missing ranks through a key-value store that every rank reaches.

Waits are polls, since calls of the store exclude each other. A call can still hang when the store's host is
stopped, so callers that must not hang use a separate thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from torch.distributed.distributed_c10d import Store

from weightsync.errors import TransportError, WireError
from weightsync.protocol.decoding import decoded

ANSWER_S = 1.0
"""Time to wait for answers. Every rank checks for a roll call several times a second."""
SEE_OFF_S = 0.4
_POLL_S = 0.01

logger = logging.getLogger("weightsync.transports")

T = TypeVar("T")


def ranks_text(ranks: Iterable[int], num_ranks: int) -> str:
    """Return ``rank 2 of 4`` or ``ranks 1, 2 of 4``."""
    names = sorted(ranks)
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))} of {num_ranks}"


@dataclass(frozen=True, slots=True)
class Absence:
    """The result of a roll call about `operation` of rank `caller`.

    Attributes:
        fault: why the caller called before the deadline; "" if the deadline passed.
        silent: the ranks that did not answer: dead, stopped or gone.
        behind: the ranks that answered, have done less than the caller, and wait for no other rank.
    """

    caller: int
    operation: int
    fault: str
    silent: tuple[int, ...]
    behind: tuple[int, ...] = ()


class _Left(msgspec.Struct, frozen=True):
    """A rank has left the communicator."""

    meetings: dict[int, int]
    cause: str


class _Call(msgspec.Struct, frozen=True):
    """A roll call to the ranks in `meetings`, with the caller's counts."""

    caller: int
    operation: int
    fault: str
    meetings: dict[int, int]


class _Here(msgspec.Struct, frozen=True):
    """A rank's answer."""

    meetings: dict[int, int]
    waiting: bool


class RollCall:
    """One rank's view of the store. Store errors (RuntimeError) propagate unless stated otherwise.

    Progress is counted in meetings: by other rank, the number of operations so far with this rank. Two ranks
    count common operations equally, whatever other operations they had.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks

    def sign_in(self, timeout_s: float) -> None:
        """Wait until every rank has signed in. Raises TransportError with the missing ranks."""
        self._store.set(f"in/{self._rank}", "")
        deadline = time.monotonic() + timeout_s
        keys = [f"in/{rank}" for rank in range(self._num_ranks)]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                if not missing:
                    return  # the last rank signed in during the check
                raise TransportError(
                    f"rank {self._rank} of {self._num_ranks} could not join: "
                    f"{ranks_text(missing, self._num_ranks)} did not come within {timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def leave(self, meetings: Mapping[int, int], cause: str) -> None:
        """Tell the other ranks that this rank has left."""
        self._write(f"left/{self._rank}", _Left(dict(meetings), cause))
        self._store.set("news", "")

    def has_news(self) -> bool:
        """Return True if a rank has left or called the roll."""
        return self._store.check(["news"])

    def left(self) -> dict[int, tuple[int, str]]:
        """Return the ranks that have left: their meetings with this rank, and the cause."""
        found = {}
        for rank in self._others():
            if left := self._read(f"left/{rank}", _Left):
                found[rank] = (left.meetings.get(self._rank, 0), left.cause)
        return found

    def called(self) -> bool:
        """Return True if a rank has called the roll."""
        return self._read("call", _Call) is not None

    def call(self, operation: int, meetings: Mapping[int, int], fault: str = "") -> None:
        """Call the roll unless another rank has. Finds ranks that met this rank less often."""
        if not self.called():
            before = self._store.get("call") if self._store.check(["call"]) else b""
            call = _Call(self._rank, operation, fault, dict(meetings))
            self._store.compare_set("call", before.decode(errors="replace"), _encode(call).decode())
            self._store.set("news", "")

    def answer(self, meetings: Mapping[int, int], waiting: bool) -> Absence:
        """Answer the roll call, then wait at most `ANSWER_S` for the other answers."""
        call = self._read("call", _Call)
        if call is None:
            return Absence(self._rank, 0, "the roll call in the store is not ours", ())
        caller, operation, fault = call.caller, call.operation, call.fault
        self._write(f"here/{self._rank}", _Here(dict(meetings), waiting))
        silent = {rank: count for rank, count in call.meetings.items() if rank != caller}
        behind: list[int] = []
        present = {caller}
        deadline = time.monotonic() + ANSWER_S
        try:
            while silent and time.monotonic() < deadline:
                for rank in sorted(silent):
                    if (here := self._read(f"here/{rank}", _Here)) is None:
                        continue
                    present.add(rank)
                    if silent.pop(rank) > here.meetings.get(caller, 0) and not here.waiting:
                        behind.append(rank)
                time.sleep(_POLL_S)
            self._see_off(len(present))
        except RuntimeError:
            # The store ended with rank 0. If rank 0 had answered, it has also finished this roll call.
            if 0 not in present:
                return Absence(caller, operation, fault, (0,))
        return Absence(caller, operation, fault, tuple(sorted(silent)), tuple(sorted(behind)))

    def _see_off(self, num_present: int) -> None:
        """Wait, on rank 0, until the other ranks have read the store."""
        seen = self._store.add("seen", 1)
        deadline = time.monotonic() + SEE_OFF_S
        while self._rank == 0 and seen < num_present and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            seen = self._store.add("seen", 0)

    def _write(self, key: str, value: msgspec.Struct) -> None:
        self._store.set(key, _encode(value).decode())

    def _read(self, key: str, kind: type[T]) -> T | None:
        """Return the message at `key`, or None if there is no message of ours."""
        if not self._store.check([key]):
            return None
        value = self._store.get(key)
        try:
            return decoded(msgspec.json.Decoder(kind).decode, value)
        except WireError as error:
            logger.warning("[rank %d] ignores %d bytes at %s: %s", self._rank, len(value), key, error)
            return None

    def _others(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank != self._rank]


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)
