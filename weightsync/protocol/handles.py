"""Where memory of another process is found: plain values, which travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from weightsync.plan import RankLayout

__all__ = [
    "Attached",
    "BufferHandle",
    "DeviceHandle",
    "Export",
    "Handle",
    "HostExport",
    "Offer",
    "ProtocolName",
]


class BufferHandle(msgspec.Struct, frozen=True, tag="host"):
    """Where another process of the same user and host finds a buffer of `nbytes`.

    `is_file`: it is a file called `name`, and is only read.
    """

    pid: int
    fd: int
    name: str
    nbytes: int
    is_file: bool = False

    @property
    def link(self) -> str:
        """What the descriptor links to."""
        return self.name if self.is_file else f"/memfd:{self.name}"


class DeviceHandle(msgspec.Struct, frozen=True, tag="device"):
    """Where another process on the same GPU finds `nbytes` of device memory.

    `ipc` stands for a whole allocation of process `pid`; the memory starts `offset` bytes into it.
    `device` is ``cuda:<UUID>``, since an index means another GPU in each process.
    """

    device: str
    pid: int
    ipc: bytes
    offset: int
    nbytes: int


Handle: TypeAlias = BufferHandle | DeviceHandle
ProtocolName = Literal["zeromq", "tcp", "rdma"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Where one buffer's bytes can be read. Can be pickled; any process that has it can read them.

    Attributes:
        holder: who offers them, for people.
        protocol: what serves them to other hosts.
        memory: how a process of the same host maps them.
        host_id: the host that they are on, see `host_id`.
        endpoint: what `protocol` connects to.
        base: the address of byte 0 in the process that serves it (Mooncake).
        secret: shown when a reader connects (ZeroMQ).
    """

    holder: str
    protocol: ProtocolName
    memory: BufferHandle
    host_id: str
    endpoint: str
    base: int = 0
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Export:
    """A rank's device memory that its holder may read or write: the layout, and each buffer's handle."""

    layout: RankLayout
    buffers: Mapping[str, DeviceHandle]


@dataclass(frozen=True, slots=True)
class HostExport:
    """A rank's host memory that its holder maps and only reads: as `Export`."""

    layout: RankLayout
    buffers: Mapping[str, BufferHandle]


@dataclass(frozen=True, slots=True)
class Attached:
    """A rank's own digest of the plan, and its memory where its holder reads or writes it in place."""

    plan_digest: str
    export: Export | None
