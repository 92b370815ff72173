"""A ledger of what the driver's calls to its peers cost."""

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
        """Pickle `value`, and copy its buffers as into Ray's object store."""
        found: list[pickle.PickleBuffer] = []
        body = dumps(value, protocol=5, buffer_callback=found.append)
        return cls(body, tuple(bytes(each.raw()) for each in found))

    def again(self) -> Message:
        """Return the same message in memory of its own, as another process sends it."""
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
        """Return this message: what it is decoded to is not shared."""
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
    """A value in Ray's object store, of which calls carry a reference.

    Attributes:
        value: what the called peer gets.
        nbytes: bytes of the pickled value.
        hosts: the hosts that have it. The first call to a host brings it there.
    """

    value: object
    nbytes: int
    hosts: set[str] = field(default_factory=set)

    def bring(self, host: str) -> int:
        """Return the bytes that cross to `host` because of one more call to it."""
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
    """What calls of one method cost: bytes out of the driver and into it, and its time for pickling."""

    calls: int = 0
    nbytes_out: int = 0
    nbytes_in: int = 0
    pickling_s: float = 0.0


class Ledger:
    """What calls cost, what they carried by reference, and the time that is the peers' and not the driver's.

    Attributes:
        costs: by method.
        peers: the peers' time.
        shared: the first value of each type that was given to `share`.
        first: the arguments of the first call of each method.
    """

    def __init__(self) -> None:
        self.clear()

    def taken(self) -> Ledger:
        """Return what was noted, and start again with nothing."""
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
        """Pickle `value` once for all calls that carry it. Its bytes are counted by the calls."""
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
        gc.disable()  # objects that a peer makes are freed before the driver goes on
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
    """A peer as the driver calls it: each method's arguments and answer are packed, and counted.

    Methods of `protocol` are packed as for a node, unless an argument is `Stored`. Others are packed by Ray's
    pickler.

    A `Stored` argument counts with the first call that brings it to the peer's host, and with no other: Ray
    keeps it in an object store on each host. Its reference, some tens of bytes, does not count. All bytes
    count as the driver's, though Ray may bring them from another host that has them.
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
