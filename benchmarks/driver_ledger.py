"""A ledger of the costs of the driver's calls to peers."""

from __future__ import annotations

import gc
import pickle
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from ray import cloudpickle

from weightsync.node.calls import Method, methods_of
from weightsync.node.codec import decode, encode
from weightsync.node.messages import Answer, Ask, from_node

__all__ = ["Cost", "Instant", "Ledger", "Message", "Reply", "Stored", "Wire"]


@dataclass(slots=True)  # not frozen: making them counts as the driver's time
class Message:
    """A pickled object and its buffers, which Ray carries beside the pickle."""

    body: bytes
    buffers: tuple[bytes, ...]

    @classmethod
    def of(cls, value: object, dumps: Callable[..., bytes] = pickle.dumps) -> Message:
        """Pickle `value`, and copy the buffers as into Ray's object store."""
        found: list[pickle.PickleBuffer] = []
        body = dumps(value, protocol=5, buffer_callback=found.append)
        return cls(body, tuple(bytes(each.raw()) for each in found))

    def again(self) -> Message:
        """Copy the message to other memory, as if another process sent it."""
        return Message(self.body, tuple(bytes(memoryview(each)) for each in self.buffers))

    def load(self) -> object:
        return pickle.loads(self.body, buffers=self.buffers)

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(map(len, self.buffers))


@dataclass(slots=True)  # not frozen: making them counts as the driver's time
class Reply:
    """A method's answer as a node sends it."""

    method: Method
    body: bytes

    @classmethod
    def of(cls, method: Method, value: object) -> Reply:
        return cls(method, msgspec.msgpack.encode(Answer(1, encode(value, method.answer))))

    def again(self) -> Reply:
        """Return this message. Each decoding makes a new value."""
        return self

    def load(self) -> object:
        reply = from_node(self.body)
        assert isinstance(reply, Answer)
        return decode(reply.value, self.method.answer)

    @property
    def nbytes(self) -> int:
        return len(self.body)


def asked(name: str, method: Method | None, args: Sequence[object]) -> int:
    """Pack a call as it travels, and return its bytes: to a node, or through Ray without a `method`."""
    if method:
        return len(msgspec.msgpack.encode(Ask(1, name, method.encoded(tuple(args)), 0.0)))
    return Message.of(list(args), cloudpickle.dumps).nbytes


def answered(method: Method | None, value: object) -> Message | Reply:
    """Return an answer as it travels. `value` may be one already."""
    if isinstance(value, Message | Reply):
        return value.again()
    return Reply.of(method, value) if method else Message.of(value)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A value in Ray's object store, which calls pass by reference.

    Attributes:
        value: the value for the called peer.
        nbytes: bytes of the pickled value.
        hosts: the hosts that have the value. The first call to a host copies the value there.
    """

    value: object
    nbytes: int
    hosts: set[str] = field(default_factory=set)

    def bring(self, host: str) -> int:
        """Return the bytes that cross to `host` because of one more call."""
        if host in self.hosts:
            return 0
        self.hosts.add(host)
        return self.nbytes


@dataclass(slots=True)  # not frozen: making them counts as the driver's time
class Instant:
    """Seconds by the wall clock and by this process's processors."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Instant:
        return cls(time.perf_counter(), time.process_time())

    def __add__(self, other: Instant) -> Instant:
        return Instant(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Instant) -> Instant:
        return Instant(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(slots=True)
class Cost:
    """Costs of one method's calls: bytes out of and into the driver, and the driver's pickling time."""

    calls: int = 0
    nbytes_out: int = 0
    nbytes_in: int = 0
    pickling_s: float = 0.0


class Ledger:
    """Costs of calls, values passed by reference, and the peers' time.

    Attributes:
        costs: costs by method.
        peers: the peers' time, which is not the driver's.
        shared: by type, the first value that was passed to `share`.
        first: by method, the arguments of the first call.
    """

    def __init__(self) -> None:
        self.clear()

    def taken(self) -> Ledger:
        """Return the recorded costs, and clear the ledger."""
        taken = Ledger()
        taken.costs, taken.peers = self.costs, self.peers
        taken.shared, taken.first = self.shared, self.first
        self.clear()
        return taken

    def clear(self) -> None:
        self.costs: defaultdict[str, Cost] = defaultdict(Cost)
        self.peers = Instant()
        self.shared: dict[type, object] = {}
        self.first: dict[str, Sequence[object]] = {}

    def share(self, value: object) -> Stored:
        """Pickle `value` once for all calls that pass it. The calls count the bytes."""
        self.shared.setdefault(type(value), value)
        cost, started = self.costs["share"], time.perf_counter()
        stored = Stored(value, Message.of(value, cloudpickle.dumps).nbytes)
        cost.calls += 1
        cost.pickling_s += time.perf_counter() - started
        return stored

    def call(
        self,
        name: str,
        method: Method | None,
        answer: Callable[..., object],
        args: Sequence[object],
        host: str,
    ) -> Any:  # noqa: ANN401
        """Pack `args`, have the peer on `host` answer, and return the answer unpacked.

        `method`: how a node is called. Without one, and with a `Stored` argument, Ray makes the call.
        """
        self.first.setdefault(name, args)
        stored = [each for each in args if isinstance(each, Stored)]
        cost, started = self.costs[name], time.perf_counter()
        sent_along = [each for each in args if not isinstance(each, Stored)] if stored else args
        method = None if stored else method
        cost.nbytes_out += asked(name, method, sent_along)
        for each in stored:
            cost.nbytes_out += each.bring(host)
        sent, sent_cpu = time.perf_counter(), time.process_time()
        collects = gc.isenabled()
        gc.disable()  # a peer's objects are freed below
        value = answer(*(each.value if isinstance(each, Stored) else each for each in args))
        message = answered(method, value)
        del value
        if collects:
            gc.enable()
        arrived, arrived_cpu = time.perf_counter(), time.process_time()
        loaded = message.load()
        cost.nbytes_in += message.nbytes
        cost.calls += 1
        self.peers.wall += arrived - sent
        self.peers.cpu += arrived_cpu - sent_cpu
        cost.pickling_s += time.perf_counter() - arrived + (sent - started)
        return loaded


class Wire:
    """A peer for the driver, with arguments and answers packed and counted.

    Methods of `protocol` are packed as for a node, unless an argument is `Stored`. Others are packed by Ray's
    pickler.

    A `Stored` argument only counts with the first call to the peer's host: Ray has an object store on each
    host. The reference, some tens of bytes, does not count. All bytes count as the driver's, although Ray may
    copy them from another host.
    """

    def __init__(self, peer: object, ledger: Ledger, host: str = "", protocol: type = object) -> None:
        self._peer, self.ledger, self._host = peer, ledger, host
        self._methods = methods_of(protocol)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    async def call(self, method: str, *args: object) -> Any:  # noqa: ANN401 (whatever the peer returns)
        answer = getattr(self._peer, method)
        return self.ledger.call(method, self._methods.get(method), answer, args, self._host)
