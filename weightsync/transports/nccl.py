"""The NCCL transport: moves bytes between GPU holders. CuPy drives NCCL on torch's memory."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as Late
from typing import Any

import torch

from weightsync.config import Ports, TlsFiles
from weightsync.errors import TransportError
from weightsync.memory import cuda
from weightsync.protocol.daemon import on_daemon
from weightsync.transports.base import Broadcast, Op, Pending, Send
from weightsync.transports.store import StoreServer
from weightsync.transports.watchdog import Watch, WatchedTransport

logger = logging.getLogger("weightsync.transports")

_POLL_S = 5e-5
_SPIN_S = 0.02
"""A wait only yields at first: one sleep takes as long as a small bucket."""
_LEAVE_S = 0.5
"""A call inside NCCL for longer than this waits for peers. Only an abort frees the call."""
_ABORT_S = 10.0


class Gate:
    """Counts calls inside a library, and can be shut against new ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._is_shut = 0, False

    def enter(self) -> bool:
        """Enter unless the gate is shut, without blocking. If this returns True, the caller must `leave`."""
        with self._changed:
            self._inside += not self._is_shut
            return not self._is_shut

    def leave(self) -> None:
        """Count the caller's call as returned."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self, timeout_s: float) -> None:
        """Refuse new calls; wait until no call is inside, at most `timeout_s` seconds."""
        with self._changed:
            self._is_shut = True
            self._changed.wait_for(lambda: self._inside == 0, timeout_s)


class NcclTransport(WatchedTransport):
    """An NCCL communicator on the device that was current at `open`.

    All communicators of a device share one stream, so their operations run one after another.
    Broadcasts of one start that are neighbours in memory on one rank must be neighbours on every rank.
    """

    use_all_gather = True
    """Send equal contiguous parts, one per rank, as one all-gather."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        super().__init__(tls)
        self._nccl: Any = None  # the module cupy.cuda.nccl; CuPy has no types
        self._comm: Any = None  # its NcclCommunicator
        self._gate = Gate()
        self._device = -1

    def offer(self, host: str, ports: Ports | None = None) -> str:
        """Serve the rendezvous, as gloo does. Returns ``secret@host:port/unique id in hex``."""
        unique_id: bytes = cuda.nccl().get_unique_id()
        self._server = StoreServer(host, ports, self._tls)
        return f"{self._server.address}/{unique_id.hex()}"

    def open(self, rendezvous: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Sign in, so that missing ranks are known, then build the communicator."""
        _compare_versions()
        self._nccl = cuda.nccl()
        address, _, unique_id = rendezvous.partition("/")
        self._device = torch.cuda.current_device()
        _, roll = self._sign_in(address, rank, num_ranks, timeout_s)
        self._comm = self._communicator(bytes.fromhex(unique_id), timeout_s)
        self._opened = Watch(roll, rank, num_ranks, timeout_s, stop=self._stop, probe=self._probe)

    def start(self, ops: Sequence[Op]) -> Pending:
        """Queue the ops as one NCCL group on the device's stream."""
        assert all(op.data.is_cuda for op in ops), "NCCL moves device memory"
        watch, stream = self._watch, _stream(self._device)
        number = watch.begin(ops)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if self._gate.enter():
            try:
                with torch.cuda.device(self._device):
                    stream.wait_stream(torch.cuda.current_stream())
                    self._issue(ops, stream.cuda_stream)
                    event.record(stream)
                failure = ""
            except self._nccl.NcclError as error:
                failure = f"NCCL rank {self._rank} of {self._num_ranks} failed in operation {number}: {error}"
            finally:
                self._gate.leave()
            if failure:
                watch.fail(failure)
        watch.check()
        pending = _NcclPending(event, number, watch)
        watch.follow(number, pending.is_over)
        return pending

    def close(self) -> None:
        """Abort the communicator and close the store. An abort needs no peer, so it cannot hang."""
        super().close()
        self._comm = None

    def _communicator(self, unique_id: bytes, timeout_s: float) -> Any:  # noqa: ANN401 - cupy has no types
        nccl = self._nccl
        # Made without __init__, so that it can be aborted while __init__ hangs.
        comm = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)

        def build() -> None:
            torch.cuda.set_device(self._device)
            comm.__init__(self._num_ranks, unique_id, self._rank)

        building = on_daemon(build)
        name = f"NCCL rank {self._rank} of {self._num_ranks}"
        try:
            building.result(timeout_s)
        except Late as error:
            on_daemon(lambda: _abort_when_possible(comm, building.done))
            raise TransportError(
                f"{name} signed in with its peers, but the communicator was not ready within {timeout_s:g} s:"
                " one of them was lost while it joined"
            ) from error
        except nccl.NcclError as error:
            raise TransportError(f"{name} could not join: {error}") from error
        return comm

    def _issue(self, ops: Sequence[Op], stream: int) -> None:
        nccl, comm = self._nccl, self._comm
        if self.use_all_gather and _is_all_gather(ops, self._num_ranks):
            base, nbytes = ops[0].data.data_ptr(), ops[0].data.numel()
            comm.allGather(base + self._rank * nbytes, base, nbytes, nccl.NCCL_UINT8, stream)
            return
        nccl.groupStart()
        try:
            for op in ops:
                address, nbytes = op.data.data_ptr(), op.data.numel()
                if isinstance(op, Broadcast):
                    comm.broadcast(address, address, nbytes, nccl.NCCL_UINT8, op.root, stream)
                else:
                    call = comm.send if isinstance(op, Send) else comm.recv
                    call(address, nbytes, nccl.NCCL_UINT8, op.peer, stream)
        finally:
            nccl.groupEnd()

    def _stop(self) -> None:
        self._gate.shut(_LEAVE_S)
        torch.cuda.set_device(self._device)
        self._comm.abort()

    def _probe(self) -> None:
        """Raise TransportError for an error of NCCL's threads, such as a lost connection."""
        if not self._gate.enter():
            return
        try:
            self._comm.check_async_error()
        except self._nccl.NcclError as error:
            raise TransportError(f"NCCL rank {self._rank} of {self._num_ranks}: {error}") from error
        finally:
            self._gate.leave()


class _NcclPending:
    def __init__(self, event: torch.cuda.Event, number: int, watch: Watch) -> None:
        self._event, self._number, self._watch = event, number, watch

    def wait(self) -> None:
        """Poll the event. An abort completes it too."""
        spin_until = time.monotonic() + _SPIN_S
        try:
            while not self._event.query():  # type: ignore[no-untyped-call]
                self._watch.check()
                time.sleep(0 if time.monotonic() < spin_until else _POLL_S)
        except RuntimeError as error:
            self._watch.fail(f"the device failed in operation {self._number}: {error}")
        self._watch.done(self._number)

    def is_over(self) -> bool:
        """Return True if the device has finished. False after a device error, which `wait` reports."""
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all communicators on `device`, of a higher priority than computation."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@functools.cache
def _compare_versions() -> None:
    ours, torchs = cuda.nccl_versions()
    if ours != torchs:
        logger.warning("NCCL %s moves the weights, and torch was built with %s", ours, torchs)


def _is_all_gather(ops: Sequence[Op], num_ranks: int) -> bool:
    """Return True if the ranks broadcast equal parts of contiguous memory, in order of ranks."""
    if num_ranks == 1 or len(ops) != num_ranks:
        return False
    base, nbytes = ops[0].data.data_ptr(), ops[0].data.numel()
    return all(
        isinstance(op, Broadcast)
        and op.root == place
        and op.data.numel() == nbytes
        and op.data.data_ptr() == base + place * nbytes
        for place, op in enumerate(ops)
    )


def _abort_when_possible(comm: Any, is_over: Callable[[], bool]) -> None:  # noqa: ANN401 - cupy has no types
    """Abort a communicator that hangs in `__init__`, once it has a handle."""
    deadline = time.monotonic() + _ABORT_S
    while not comm.comm and not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if comm.comm:
        comm.abort()
