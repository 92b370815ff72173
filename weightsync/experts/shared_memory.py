"""Ranks that are processes of one host, and read each other's memory."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, DeadlineError, PeerLostError, TransportError, WeightSyncError
from weightsync.experts.movers import MessageMover, Mover, pulled
from weightsync.memory.host import SharedBuffer

S = TypeVar("S", bound=msgspec.Struct)

_MESSAGE_NBYTES = 8192


class SharedMemoryMover(Mover):
    """Processes of one host. Tokens on a GPU go through the host's memory.

    In an exchange a rank waits until all peers have read the rank's previous rows. Then the rank writes rows
    into memory of its own that the peers map. Once the peers have written too, the rank copies the needed
    rows from the peers' memory. No rank writes into another rank's memory, so that a late rank damages
    nothing.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float = 60.0) -> None:
        """
        Args:
            group: the ranks, by which they find each other: gloo, or gloo and NCCL. Tokens do not use it.
            timeout_s: the longest wait for another rank in an exchange.

        Raises ConfigError on all ranks: names ranks of other hosts, or of other users.
        """
        self._messages = MessageMover(group)
        self.rank, self.num_ranks = self._messages.rank, self._messages.num_ranks
        self._signals = _Signals(self._messages, timeout_s)
        self._memory = list[SharedBuffer]()
        self._failed: WeightSyncError | None = None

    def exchange(self, sent: torch.Tensor, sends: torch.Tensor, receives: torch.Tensor) -> torch.Tensor:
        """See `Mover.exchange`."""
        if self._failed:
            raise TransportError(f"this mover has ended ({self._failed}): make new movers on all ranks")
        try:
            return self._exchange(sent, receives)
        except WeightSyncError as error:
            self._failed = error
            raise

    def close(self) -> None:
        """Unmap the memory. Peers that wait for this rank are told. Safe to call twice."""
        self._failed = self._failed or TransportError("it was closed")
        self._signals.close()
        while self._memory:
            self._memory.pop().close()

    def _exchange(self, sent: torch.Tensor, receives: torch.Tensor) -> torch.Tensor:
        shape = (*sent.shape[:-2], receives.shape[1], sent.shape[-1])  # the same on all ranks
        nbytes = torch.Size(shape).numel() * sent.itemsize
        self._signals.wait()  # peers have read
        if not self._memory or nbytes > self._memory[0].handle.nbytes:
            self._grow(nbytes)
        views = [each.tensor[:nbytes].view(sent.dtype).view(shape) for each in self._memory]
        views[self.rank][..., : sent.shape[-2], :] = sent
        self._signals.send()
        self._signals.wait()  # peers have written
        received = pulled(views.__getitem__, self.rank, receives.cpu(), views[self.rank])
        self._signals.send()
        return received.to(sent.device)

    def _grow(self, nbytes: int) -> None:
        """Replace the memory. All ranks do so in the same call, since they need as many bytes."""
        self._signals.send()
        self._signals.wait()  # the group would not name a rank that is late
        own = SharedBuffer.create(nbytes)
        handles = gathered(self._messages, own.handle)
        before = self._memory
        self._memory = [
            own if rank == self.rank else SharedBuffer.open(handle) for rank, handle in enumerate(handles)
        ]
        for each in before:
            each.close()


class _Inboxes(msgspec.Struct):
    """A process's pipes, one for each rank: descriptors to write to, and their names in ``/proc``."""

    pid: int
    fds: list[int]
    names: list[str]


class _Signals:
    """Counts of signals between all ranks, over pipes. `wait` waits until all peers have sent as many."""

    def __init__(self, messages: MessageMover, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._num_sent = messages.rank, timeout_s, 0
        self._peers = [peer for peer in range(messages.num_ranks) if peer != messages.rank]
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(messages.num_ranks)]
        self._in, fds = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
        told = gathered(messages, _Inboxes(os.getpid(), fds, names))
        self._out = [_opened(theirs, self._rank) for theirs in told]
        reached = torch.tensor([[fd >= 0 for fd in self._out]])
        apart = (~messages.gather(reached)[:, 0]).any(0).nonzero().flatten().tolist()  # all have opened now
        for fd in fds:  # so that the end of the other process is seen
            os.close(fd)
        self._seen = [0] * messages.num_ranks
        if apart:
            self.close()
            raise ConfigError(
                "group", apart, "these ranks do not reach each other's memory: use MessageMover"
            )

    def send(self) -> None:
        """Send a signal to all peers. A peer that has ended may have needed none: `wait` finds out."""
        self._num_sent += 1
        for peer in self._peers:
            with suppress(BrokenPipeError):
                os.write(self._out[peer], b"\0")

    def wait(self) -> None:
        """Wait until all peers have sent as many signals as this rank.

        Raises DeadlineError with the late ranks, or PeerLostError.
        """
        deadline = time.monotonic() + self._timeout_s
        for peer in self._peers:
            while self._is_late(peer):
                if not self._read(peer, max(0.0, deadline - time.monotonic())):
                    late = [each for each in self._peers if self._is_late(each) and not self._read(each, 0)]
                    raise DeadlineError("exchange", [f"rank {each}" for each in late], self._timeout_s)

    def close(self) -> None:
        """Close all pipes. Safe to call twice."""
        for fd in {*self._in, *self._out} - {-1}:
            os.close(fd)
        self._in, self._out = [], []

    def _is_late(self, peer: int) -> bool:
        return self._seen[peer] < self._num_sent

    def _read(self, peer: int, timeout_s: float) -> bool:
        """Count a peer's signals. Returns False if none comes in time."""
        poll = select.poll()
        poll.register(self._in[peer], select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        signals = os.read(self._in[peer], 64)
        if not signals:
            raise PeerLostError(f"rank {peer}", "its process has ended, or closed its mover")
        self._seen[peer] += len(signals)
        return True


def _opened(theirs: _Inboxes, rank: int) -> int:
    """Open the pipe to another process. Returns -1 if there is no such process here."""
    path = f"/proc/{theirs.pid}/fd/{theirs.fds[rank]}"
    with suppress(OSError):
        if os.readlink(path) == theirs.names[rank]:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return -1


def gathered(messages: MessageMover, own: S) -> list[S]:
    """Return a message from every rank."""
    data = msgspec.json.encode(own)
    part = torch.frombuffer(bytearray(data.ljust(_MESSAGE_NBYTES)), dtype=torch.uint8)
    told = messages.gather(part[None])[:, 0]
    return [msgspec.json.decode(bytes(each.tolist()), type=type(own)) for each in told]
