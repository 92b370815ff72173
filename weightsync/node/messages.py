"""The messages between a driver and a node."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weightsync.channel.wire import SentError
from weightsync.config import TlsFiles
from weightsync.protocol.decoding import decoded

MAX_NBYTES = 1 << 30
"""The limit of a message, once the node has shown its secret: a plan of 70,000 tensors has tens of MB."""


class NodeOffer(msgspec.Struct, frozen=True):
    """How a node reaches its driver. Carries a secret: do not log it.

    Each node has a secret of its own, by which the driver knows the node.

    `log_level`: the level from which the node's process logs, see `use_log_level`.
    `tls`: where a host has its files, if the driver speaks TLS.
    """

    endpoint: str
    secret: str
    log_level: str = ""
    tls: TlsFiles | None = None

    def __repr__(self) -> str:
        return f"NodeOffer(endpoint={self.endpoint!r})"


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A server that Ray did not start -> driver, after the token: where users reach it.

    `process` differs by process.
    """

    url: str
    process: str


class JoinRank(msgspec.Struct, frozen=True, tag="join_rank"):
    """A trainer rank that Ray did not start -> driver, after the token. `process` differs by process."""

    rank: int
    world_size: int
    process: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Node -> driver, first: the process, and the tickets of calls that it has yet to answer."""

    process: str
    open: frozenset[int]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Node -> driver: the answer to call `ticket`."""

    ticket: int
    value: bytes


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """Node -> driver: the error of call `ticket`; its `text` if it is no error of ours."""

    ticket: int
    error: SentError | None
    text: str = ""


class Late(msgspec.Struct, frozen=True, tag="late"):
    """Node -> driver: call `ticket` came after its deadline, and was not carried out."""

    ticket: int


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """Node -> driver: call `ticket` has resolved its future, see `Method.tells`."""

    ticket: int


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Node -> driver: news that belong to no call, with a number and, if there is more to say, a value."""

    number: int
    value: bytes = b""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Driver -> node: the node has its place, again if it had it before.

    `now`: the driver's monotonic clock, in seconds, by which `Ask.deadline` counts.
    """

    now: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Driver -> node: the node has no place here. It must not dial again."""

    why: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """Driver -> node: the driver needs the node no more."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Driver -> node: call `method`, unless `deadline` has passed, as after a link was down.

    `part`: the part of the process that is called, such as an adapter; "" for the process itself.
    """

    ticket: int
    method: str
    args: bytes
    deadline: float
    part: str = ""


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Driver -> node: nobody waits for the answer to call `ticket` any more."""

    ticket: int


class Place(msgspec.Struct, frozen=True, tag="place"):
    """Driver -> process that joins: dial again, as a node."""

    offer: NodeOffer


Joined: TypeAlias = Place | Refused
ToNode: TypeAlias = Welcome | Refused | Bye | Ask | Drop
FromNode: TypeAlias = Hello | Answer | Raised | Late | Tell | Notice

_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_joined: msgspec.msgpack.Decoder[Joined] = msgspec.msgpack.Decoder(Joined)
_join: msgspec.msgpack.Decoder[Join | JoinRank] = msgspec.msgpack.Decoder(Join | JoinRank)
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


def to_node(data: bytes) -> ToNode:
    """Decode a driver's message. Raises WireError for anything else."""
    return decoded(_to_node.decode, data)


def from_node(data: bytes) -> FromNode:
    """Decode a node's message. Raises WireError for anything else."""
    return decoded(_from_node.decode, data)


def joining(data: bytes) -> Join | JoinRank:
    """Decode the first message of a process that joins. Raises WireError for anything else."""
    return decoded(_join.decode, data)


def joined(data: bytes) -> Joined:
    """Decode the driver's answer to a `Join`. Raises WireError for anything else."""
    return decoded(_joined.decode, data)
