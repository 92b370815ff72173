"""The gloo transport: moves bytes between CPU holders over TCP, through torch's gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo

from weightsync.config import Ports, TlsFiles
from weightsync.errors import TransportError
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.routes import own_address
from weightsync.transports.base import Broadcast, Op, Pending, Send
from weightsync.transports.reach import CONNECTED, Reach
from weightsync.transports.roll_call import ranks_text
from weightsync.transports.store import StoreServer
from weightsync.transports.watchdog import SLACK_S, Watch, WatchedTransport

_SLICE_S = 0.05
"""The longest time after which a waiting thread sees an abort."""
_LEAST_S = 0.1
"""Time that is always left for connecting, even if signing in took until the deadline."""
_MARGIN_S = 5.0
_NUM_WAITS = 3
"""gloo's own time-out, in waits plus the margin. Our time-out must come first, since it names late ranks.

Our time-out only counts for the oldest of several pending operations.
"""


class GlooTransport(WatchedTransport):
    """A gloo process group that is independent of torch's default group.

    gloo cannot stop a running operation. After an abort the operation continues in gloo's threads, and may
    write its data, until the peers' connections close or gloo's own time-out.
    """

    def __init__(self, tls: TlsFiles | None = None) -> None:
        super().__init__(tls)
        self._group: Any = None  # a ProcessGroupGloo, whose stub lacks the collectives
        self._works: list[Future[object]] = []
        self._timeout = timedelta(0)

    def offer(self, host: str, ports: Ports | None = None) -> str:
        """Serve the rendezvous on one of `ports`, or a free one, and return ``secret@host:port``."""
        self._server = StoreServer(host, ports, self._tls)
        return self._server.address

    def open(self, rendezvous: str, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Sign in, then connect to every rank on the interface that leads to `rendezvous`."""
        self._timeout = _own_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s + SLACK_S
        store, roll = self._sign_in(rendezvous, rank, num_ranks, timeout_s)
        reach: Reach | None = None
        try:
            address = own_address(rendezvous)
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=timeout_s)
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            # ProcessGroupGloo calls the store several times, with separate deadlines.
            making = on_daemon(
                partial(ProcessGroupGloo, PrefixStore("gloo", store), rank, num_ranks, options)
            )
            if not wait([making], timeout_s / 2).done:
                reach = Reach(store, rank, num_ranks, address)
                on_daemon(reach.examine)
            self._group = making.result(max(_LEAST_S, deadline - time.monotonic()))
            store.set(CONNECTED.format(rank), "")
        except (Late, OSError, RuntimeError, ValueError) as error:
            cause = self._unconnected(timeout_s, reach) if reach and isinstance(error, Late) else error
            place = rendezvous.rpartition("@")[2]
            raise TransportError(
                f"gloo rank {rank} of {num_ranks} could not join at {place}: {cause}"
            ) from error
        finally:
            if reach:
                reach.close()
        self._opened = Watch(roll, rank, num_ranks, timeout_s, stop=_nothing, probe=_nothing)

    def set_timeout(self, timeout_s: float) -> None:
        self._timeout = _own_timeout(timeout_s)
        super().set_timeout(timeout_s)

    def start(self, ops: Sequence[Op]) -> Pending:
        """Queue the ops in order; gloo's threads run them."""
        watch = self._watch
        self._works = [work for work in self._works if not work.done()]
        number = watch.begin(ops)
        try:
            works = [*map(on_daemon, [self._start(op) for op in ops])]
        except RuntimeError as error:
            watch.fail(f"gloo could not start operation {number}: {error}")
            raise
        self._works += works
        watch.follow(number, lambda: all(work.done() and not work.exception() for work in works))
        return _GlooPending(works, number, watch)

    def _unconnected(self, timeout_s: float, reach: Reach) -> str:
        """Return the ranks without connections to every other rank, and the pairs that fail."""
        asking = on_daemon(lambda: (ranks_text(reach.unconnected(), self._num_ranks), reach.text()))
        try:
            missing, unreached = asking.result(SLACK_S)
        except (Late, RuntimeError):
            missing, unreached = "not all ranks", ""  # rank 0, which knows, is not reached
        said = f"{missing} did not connect to every other within {timeout_s:g} s"
        return f"{said}: {unreached}" if unreached else said

    def close(self) -> None:
        """Close the connections and the store."""
        if not all(work.done() for work in self._works):
            on_daemon(partial(_hold, self._group, self._works))
        self._group, self._works = None, []
        super().close()

    def _start(self, op: Op) -> Callable[[], object]:
        """Start an operation. Returns the wait for its end, for a thread: gloo does not report the end."""
        if isinstance(op, Broadcast):
            options = BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = op.root, 0, self._timeout
            wait_done: Callable[[], object] = self._group.broadcast([op.data], options).wait
            return wait_done
        call = self._group.send if isinstance(op, Send) else self._group.recv
        return partial(call([op.data], op.peer, 0).wait, self._timeout)


class _GlooPending:
    def __init__(self, works: Sequence[Future[object]], number: int, watch: Watch) -> None:
        self._works, self._number, self._watch = works, number, watch

    def wait(self) -> None:
        """Wait for the works in turn, in slices, so that an abort is seen."""
        try:
            for work in self._works:
                while not wait([work], _SLICE_S).done:
                    self._watch.check()
                work.result()
        except RuntimeError as error:
            self._watch.fail(f"gloo failed in operation {self._number}: {error}")
        self._watch.done(self._number)
        self._works = ()


def _hold(group: ProcessGroupGloo, works: Sequence[Future[object]]) -> None:
    """Keep `group` until all `works` end. Destroying `group` would wait and block all of Python."""
    wait(works)


def _own_timeout(timeout_s: float) -> timedelta:
    """Return gloo's own time-out for an operation with our time-out `timeout_s`."""
    return timedelta(seconds=_NUM_WAITS * timeout_s + _MARGIN_S)


def _nothing() -> None:
    """Do nothing: gloo cannot be stopped or asked for errors."""
